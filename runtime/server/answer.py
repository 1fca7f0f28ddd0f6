"""The response of the generating endpoints: from submit to the last byte, with a cancel on every exit path.

Deltas come from the engine's thread and go out on the event loop. The engine never waits for a reader: deltas of a slow
one queue up in a list that the request's own max_tokens bounds, and are sent in one chunk when it reads again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from flexspec.runtime.engine.api import Delta, EngineClient, RequestStats
from flexspec.runtime.server.connection import EVENTS
from flexspec.runtime.server.drain import Drain
from flexspec.runtime.server.failures import NO_REASON, engine_error, shutting_down
from flexspec.runtime.server.openai import (
    SSE_DONE,
    ChatFormat,
    Format,
    Json,
    TextFormat,
    counts,
    error_body,
    sse,
    to_json,
    usage,
)
from flexspec.runtime.server.requests import GenerationRequest, Sample

CUT_WAIT_S = 1.0  # after a cancel at shutdown, how long the engine has to deliver its last text
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the stream back otherwise
]


class Answer(Response):
    """Submits when it is sent, so that no request is lost between the endpoint and the first byte.

    Errors of ``submit`` reach the application's handlers, because nothing has been sent yet. A client that disconnects
    ends the work at once, streaming or not.
    """

    def __init__(self, engine: EngineClient, request: GenerationRequest, drain: Drain) -> None:
        super().__init__()
        self._engine = engine
        self._request = request
        self._drain = drain
        self._form: Format = ChatFormat(request.model) if request.kind == "chat" else TextFormat(request.model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = Generation(self._engine, self._request.samples)
        scope.setdefault("state", {})[EVENTS] = self._request.stream
        try:
            generation.submit()
            with self._drain.cutting(generation.cut):
                work = self._stream if self._request.stream else self._complete
                await unless_gone(work(generation, send), receive)
        finally:
            generation.cancel()

    async def _stream(self, generation: Generation, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        for event in self._begin():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        opened: set[int] = set()
        failed = False
        while not failed and (chunks := await generation.next_chunks()) is not None:
            for chunk in sorted(chunks, key=lambda chunk: chunk.finish_reason == "error"):  # an error comes last
                failed = failed or chunk.finish_reason == "error"
                for event in self._events(chunk, opened, generation):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        for event in self._end(generation, failed):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _begin(self) -> list[bytes]:
        """Events before any text."""
        return []

    def _end(self, generation: Generation, failed: bool) -> list[bytes]:
        """Events after the last text, or after an error."""
        if failed or not self._request.include_usage:
            return [SSE_DONE]
        return [sse({**self._form.chunk([]), "usage": self._usage(generation)}), SSE_DONE]

    def _events(self, chunk: Chunk, opened: set[int], generation: Generation) -> list[bytes]:
        """Events of one chunk: the opening of its choice, its text, and its end or error."""
        choices: list[Json] = []
        if chunk.index not in opened and (chunk.text or chunk.finish_reason):
            opened.add(chunk.index)
            opening = self._form.opening(chunk.index)
            choices += [opening] if opening else []
            if self._request.echoes:
                choices.append(self._form.content(chunk.index, self._request.echoes[chunk.index]))
        if chunk.text:
            choices.append(self._form.content(chunk.index, chunk.text))
        if chunk.finish_reason not in (None, "error"):
            choices.append(self._form.closing(chunk.index, str(chunk.finish_reason)))
        # OpenAI: every chunk has a usage field, null but for the last, when usage was requested.
        extra: Json = {"usage": None} if self._request.include_usage else {}
        if self._request.continuous_usage:
            extra = {"usage": counts(self._request.prompt_tokens, sum(choice.tokens for choice in generation.choices))}
        events = [sse({**self._form.chunk([choice]), **extra}) for choice in choices]
        if chunk.finish_reason == "error":
            events.append(sse(error_body(chunk.error or NO_REASON, "server_error", None, "engine_error")))
        return events

    async def _complete(self, generation: Generation, send: Send) -> None:
        texts = list(self._request.echoes) or [""] * len(generation.choices)
        while (chunks := await generation.next_chunks()) is not None:
            for chunk in chunks:
                texts[chunk.index] += chunk.text
                if chunk.finish_reason == "error":
                    raise engine_error(chunk.error)
        if any(choice.finish_reason == "cancelled" for choice in generation.choices):
            raise shutting_down()  # a partial answer must not look complete; the client may retry
        body = to_json(self._whole(texts, generation))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _whole(self, texts: list[str], generation: Generation) -> Json:
        """The answer in one object."""
        choices = [
            self._form.choice(index, texts[index], choice.finish_reason or "")
            for index, choice in enumerate(generation.choices)
        ]
        return {**self._form.complete(choices), "usage": self._usage(generation)}

    def _usage(self, generation: Generation) -> Json:
        return usage(self._request.prompt_tokens, [choice.stats for choice in generation.choices])


class Inbox:
    """Deltas of all choices of one answer. ``put`` is called by any thread and never blocks; ``get`` by the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._items: list[tuple[int, Delta]] = []
        self._waking = False
        self._filled = asyncio.Event()

    def put(self, index: int, delta: Delta) -> None:
        """Add a delta of a choice."""
        with self._lock:
            self._items.append((index, delta))
            wake, self._waking = not self._waking, True
        if wake:
            with suppress(RuntimeError):  # the loop is closed: no reader is left, and the engine must not fail
                self._loop.call_soon_threadsafe(self._filled.set)

    async def get(self) -> list[tuple[int, Delta]]:
        """All deltas since the last call, at least one."""
        await self._filled.wait()
        self._filled.clear()
        with self._lock:
            items, self._items = self._items, []
            self._waking = False
        return items


@dataclass(slots=True)
class Choice:
    """The state of one choice."""

    prompt_tokens: int
    request_id: int = -1
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)  # the engine's, at the end

    def take(self, delta: Delta) -> None:
        self.tokens += len(delta.token_ids)
        self.finish_reason, self.error = delta.finish_reason, delta.error
        if delta.finish_reason is not None:
            self.stats = delta.stats

    def counted(self) -> RequestStats:
        return RequestStats(prompt_tokens=self.prompt_tokens, completion_tokens=self.tokens)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Unsent text of one choice, and its end if it has ended."""

    index: int
    text: str
    finish_reason: str | None
    error: str | None


class Generation:
    """The engine requests of one answer. ``cancel`` must run in any case after ``submit``."""

    def __init__(self, engine: EngineClient, samples: tuple[Sample, ...]) -> None:
        self._engine = engine
        self._samples = samples
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox(self._loop)
        self._cutter: asyncio.TimerHandle | None = None
        self.choices = [Choice(len(sample.prompt_ids)) for sample in samples]

    def submit(self) -> None:
        """Submit all choices to the engine. Raises its errors; the caller then cancels those submitted before."""
        for sample, choice in zip(self._samples, self.choices, strict=True):
            deliver = partial(self._inbox.put, sample.index)
            choice.request_id = self._engine.submit(sample.prompt_ids, sample.params, deliver, self)

    async def next_chunks(self) -> list[Chunk] | None:
        """New text, at most one chunk per choice; None when every choice has a finish_reason."""
        if all(choice.finish_reason is not None for choice in self.choices):
            return None
        texts: dict[int, list[str]] = {}
        for index, delta in await self._inbox.get():
            choice = self.choices[index]
            if choice.finish_reason is None:
                choice.take(delta)
                texts.setdefault(index, []).append(delta.text)
        return [
            Chunk(index, "".join(parts), self.choices[index].finish_reason, self.choices[index].error)
            for index, parts in texts.items()
        ]

    def cancel(self) -> None:
        """Cancel the choices that the engine may still work on."""
        if self._cutter is not None:
            self._cutter.cancel()
        for choice in self.choices:
            if choice.request_id >= 0 and choice.finish_reason is None:
                self._engine.cancel(choice.request_id)

    def cut(self) -> None:
        """End the answer now: cancel, take what the engine still delivers, and close it ourselves if nothing comes."""
        self.cancel()
        self._cutter = self._loop.call_later(CUT_WAIT_S, self._close)

    def _close(self) -> None:
        for index, choice in enumerate(self.choices):
            if choice.finish_reason is None:
                self._inbox.put(index, Delta("", (), "cancelled", choice.counted()))


async def unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run ``work``, but stop it as soon as the client disconnects. Raises what ``work`` raises."""
    job = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            job.result()
    finally:
        job.cancel()
        gone.cancel()
        await asyncio.gather(job, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""The response of the generating endpoints: from submit to the last byte, with a cancel on every way out."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from flexspec.runtime.api import EngineClient
from flexspec.runtime.server.drain import Drain
from flexspec.runtime.server.failures import NO_REASON, engine_error, shutting_down
from flexspec.runtime.server.openai import (
    SSE_DONE,
    ChatFormat,
    Format,
    Json,
    TextFormat,
    error_body,
    sse,
    to_json,
    usage,
)
from flexspec.runtime.server.requests import Ask
from flexspec.runtime.server.stream import Generation, Piece, unless_gone

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the stream back otherwise
]


class Answer(Response):
    """Submits when it is sent, so that nothing can get lost between the endpoint and the first byte.

    Errors of ``submit`` reach the application's handlers, because nothing has been sent then. A client that leaves ends
    the work at once, streaming or not.
    """

    def __init__(self, engine: EngineClient, ask: Ask, drain: Drain) -> None:
        super().__init__()
        self._engine = engine
        self._ask = ask
        self._drain = drain
        self._form: Format = ChatFormat(ask.model) if ask.kind == "chat" else TextFormat(ask.model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = Generation(self._engine, self._ask.samples)
        try:
            generation.submit()
            with self._drain.cutting(generation.cut):
                work = self._stream if self._ask.stream else self._whole
                await unless_gone(work(generation, send), receive)
        finally:
            generation.cancel()

    async def _stream(self, generation: Generation, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        opened: set[int] = set()
        failed = False
        while not failed and (pieces := await generation.next_pieces()) is not None:
            for piece in sorted(pieces, key=lambda piece: piece.finish_reason == "error"):  # an error is the last word
                failed = failed or piece.finish_reason == "error"
                for event in self._events(piece, opened):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        if self._ask.include_usage and not failed:
            event = sse({**self._form.chunk([]), "usage": self._usage(generation)})
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": SSE_DONE, "more_body": False})

    def _events(self, piece: Piece, opened: set[int]) -> list[bytes]:
        """Events of one piece: the opening of its choice, its text, and its end or error."""
        choices: list[Json] = []
        if piece.index not in opened and (piece.text or piece.finish_reason):
            opened.add(piece.index)
            opening = self._form.opening(piece.index)
            choices += [opening] if opening else []
        if piece.text:
            choices.append(self._form.piece(piece.index, piece.text))
        if piece.finish_reason not in (None, "error"):
            choices.append(self._form.closing(piece.index, str(piece.finish_reason)))
        # OpenAI: every chunk has a usage field, null but for the last, when usage was asked for.
        extra = {"usage": None} if self._ask.include_usage else {}
        events = [sse({**self._form.chunk([choice]), **extra}) for choice in choices]
        if piece.finish_reason == "error":
            events.append(sse(error_body(piece.error or NO_REASON, "server_error", None, "engine_error")))
        return events

    async def _whole(self, generation: Generation, send: Send) -> None:
        texts = [""] * len(generation.choices)
        while (pieces := await generation.next_pieces()) is not None:
            for piece in pieces:
                texts[piece.index] += piece.text
                if piece.finish_reason == "error":
                    raise engine_error(piece.error)
        if any(choice.finish_reason == "cancelled" for choice in generation.choices):
            raise shutting_down()  # half an answer must not look like a whole one; the client may ask again
        choices = [
            self._form.choice(index, texts[index], choice.finish_reason or "")
            for index, choice in enumerate(generation.choices)
        ]
        body = to_json({**self._form.whole(choices), "usage": self._usage(generation)})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _usage(self, generation: Generation) -> Json:
        return usage(self._ask.prompt_tokens, [choice.stats for choice in generation.choices])

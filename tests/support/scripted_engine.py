"""An engine that says what a script tells it, in a thread of its own, and remembers what was done to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flexspec.runtime.engine.api import Delta, EngineLoad, OnDelta, RequestStats, check_prompt_ids
from flexspec.sampling import SamplingParams

BOS = 256
DRAFTED, ACCEPTED = 4, 2  # what each round of a scripted request claims


@dataclass(frozen=True)
class Script:
    """Pieces of text, a token each, then the finish. A request that reaches max_tokens ends with "length"."""

    pieces: Sequence[str]
    finish: str = "stop"
    error: str | None = None


@dataclass
class _Running:
    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    on_delta: OnDelta
    script: Script
    said: int = 0


class ScriptedEngine:
    """``script`` may be changed at any time; ``refusal`` is raised by submit; ``deaf`` makes it stuck.

    With ``gated`` a step happens only when ``allow`` was called for it; cancelling works in any case.
    """

    def __init__(self, *, gated: bool = False) -> None:
        self.script: Script | Callable[[list[int], SamplingParams], Script] = Script(("Hello", " world"))
        self.refusal: Exception | None = None
        self.refuse_after = 0
        self.deaf = False
        self.failure: str | None = None
        self.step_age_s = 0.25
        self.submitted: list[tuple[list[int], SamplingParams]] = []
        self.groups: list[object] = []  # of the submitted
        self.cancelled: list[int] = []
        self.ended: dict[int, str] = {}
        self._gated = gated
        self._permits = 0
        self._running: dict[int, _Running] = {}
        self._dropped: set[int] = set()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="scripted-engine")
        self._thread.start()

    def submit(self, prompt_ids: list[int], params: SamplingParams, on_delta: OnDelta, group: object = None) -> int:
        check_prompt_ids(prompt_ids, BOS + 1)
        with self._changed:
            if self.refusal is not None and len(self.submitted) >= self.refuse_after:
                raise self.refusal
            self.submitted.append((prompt_ids, params))
            self.groups.append(group)
            request_id = len(self.submitted)
            script = self.script if isinstance(self.script, Script) else self.script(prompt_ids, params)
            self._running[request_id] = _Running(request_id, prompt_ids, params, on_delta, script)
            self._changed.notify_all()
            return request_id

    def cancel(self, request_id: int) -> None:
        with self._changed:
            self.cancelled.append(request_id)
            if request_id in self._running:
                self._dropped.add(request_id)
            self._changed.notify_all()

    def last_step_age_s(self) -> float:
        return self.step_age_s

    def load(self) -> EngineLoad:
        with self._changed:
            return EngineLoad(len(self._running), 0, self.failure)

    def allow(self, steps: int) -> None:
        """Let a gated engine do this many steps more; a step gives each running request one piece."""
        with self._changed:
            self._permits += steps
            self._changed.notify_all()

    def wait_until(self, holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait for a state of the engine; fails the test if it does not come."""
        with self._changed:
            assert self._changed.wait_for(holds, timeout_s), "the engine never got there"

    def idle(self) -> bool:
        return not self._running

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _ready(self) -> bool:
        if self._closing:
            return True
        if self.deaf:
            return False
        return bool(self._dropped) or bool(self._running and (not self._gated or self._permits))

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._ready)
                if self._closing:
                    return
                dropped = [self._running[request_id] for request_id in self._dropped]
                self._dropped.clear()
                step = not dropped and (not self._gated or self._permits > 0)
                self._permits -= step and self._gated
                running = list(self._running.values()) if step else []
            for request in dropped:
                self._end(request, "", (), "cancelled", None)
            for request in running:
                self._say(request)
            time.sleep(0)  # give the interpreter lock away, as a real step does

    def _say(self, request: _Running) -> None:
        script = request.script
        if request.said == len(script.pieces):
            self._end(request, "", (), script.finish, script.error)
            return
        text, ids = script.pieces[request.said], (request.said,)
        request.said += 1
        if request.said == request.params.max_tokens:
            self._end(request, text, ids, "length", None)
            return
        request.on_delta(Delta(text, ids))
        with self._changed:
            self._changed.notify_all()

    def _end(self, request: _Running, text: str, ids: tuple[int, ...], reason: str, error: str | None) -> None:
        rounds = max(0, request.said - 1)
        stats = RequestStats(
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=request.said,
            rounds=rounds,
            drafted=DRAFTED * rounds,
            accepted=ACCEPTED * rounds,
        )
        request.on_delta(replace(Delta(text, ids, reason, stats), error=error))
        with self._changed:
            self.ended[request.request_id] = reason
            self._running.pop(request.request_id)
            self._dropped.discard(request.request_id)
            self._changed.notify_all()


class ByteTokenizer:
    """UTF-8 bytes as ids; BOS for a leading "<bos>", or in front when asked, once."""

    vocab_size = BOS + 1
    longest_token_bytes = 5  # "<bos>"

    def encode(self, text: str, add_special: bool) -> list[int]:
        written = text.startswith("<bos>")
        return [BOS] * (add_special or written) + list(text.removeprefix("<bos>").encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(token for token in ids if token < BOS).decode("utf-8", "replace")


class PlainChat:
    """A template with one line a message, which leaves BOS to the tokenizer unless ``bos`` is given."""

    knows_tools = False

    def __init__(self, bos: str = "") -> None:
        self._bos = bos

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        lines = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        return f"{self._bos}{lines}<assistant>"

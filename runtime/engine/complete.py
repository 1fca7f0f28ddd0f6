"""Requests run to their end in the calling thread: submit, step, collect.

Used by the Python face, commands, measurements and tests; a server gives the engine a thread of its own instead
(runtime/engine/thread.py). Several threads may call at once: a step advances the requests of all. Whatever ends a call
early (an error, Ctrl-C, a consumer that stops reading a stream) cancels its requests, which leave the engine at its
next step.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from flexspec.errors import EngineError, QueueFullError
from flexspec.runtime.engine.api import Delta, RequestStats
from flexspec.runtime.engine.engine import Engine
from flexspec.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Completion:
    """The complete answer to one request."""

    prompt: str | None  # the text that was continued; None for a prompt of token ids
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # committed after the prompt, an end token included
    text: str
    finish_reason: str  # "stop" or "length"
    stats: RequestStats


@dataclass(slots=True)
class _Call:
    """A request in progress. ``finished`` is its last delta."""

    prompt_ids: list[int]
    params: SamplingParams
    deltas: list[Delta] = field(default_factory=list)
    request_id: int = -1

    @property
    def finished(self) -> Delta | None:
        return self.deltas[-1] if self.deltas and self.deltas[-1].finish_reason is not None else None

    def completion(self, last: Delta) -> Completion:
        """Raises EngineError for a request that did not finish."""
        assert last.finish_reason is not None
        _check_finished(last)
        tokens = tuple(token for delta in self.deltas for token in delta.token_ids)
        text = "".join(delta.text for delta in self.deltas)
        return Completion(None, tuple(self.prompt_ids), tokens, text, last.finish_reason, last.stats)


def complete(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
    """Run all prompts together (continuous batching); completions are in the order of the prompts.

    Raises RequestError or CapacityError, before anything runs, for a prompt that can never run, and EngineError when a
    request ends without its answer.
    """
    calls = [_Call(list(ids), one) for ids, one in zip(prompts, params, strict=True)]
    for call in calls:
        engine.check(call.prompt_ids, call.params)
    waiting = deque(calls)
    open_calls = calls
    try:
        while open_calls:
            with interrupts_deferred():
                _submit(engine, waiting)
                _step(engine, open_calls)
            open_calls = [call for call in open_calls if call.finished is None]
    finally:
        _cancel(engine, open_calls)
    return [call.completion(call.deltas[-1]) for call in calls]


def stream(engine: Engine, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[Delta]:
    """The deltas of one request as they are committed; the last one has the finish_reason and the final stats.

    The request runs while the caller reads, and is cancelled when the iterator is closed. Raises as :func:`complete`
    does: at once for a prompt that can never run, from the iterator for a failure.
    """
    engine.check(list(prompt_ids), params)
    return _stream(engine, _Call(list(prompt_ids), params))


def _stream(engine: Engine, call: _Call) -> Iterator[Delta]:
    waiting = deque([call])
    taken = 0
    try:
        while True:
            while taken == len(call.deltas):
                with interrupts_deferred():
                    _submit(engine, waiting)
                    _step(engine, [call])
            delta = call.deltas[taken]
            taken += 1
            if delta.finish_reason is not None:
                _check_finished(delta)
            yield delta
            if delta.finish_reason is not None:
                return
    finally:
        _cancel(engine, [call])


def _submit(engine: Engine, waiting: deque[_Call]) -> None:
    """Submit as many calls as the engine's queue takes; the others wait for the next step."""
    try:
        while waiting:
            call = waiting[0]
            call.request_id = engine.submit(call.prompt_ids, call.params, call.deltas.append)
            waiting.popleft()
    except QueueFullError:
        pass


def _step(engine: Engine, calls: Sequence[_Call]) -> None:
    try:
        busy = engine.step()
    except Exception as error:  # our own bug: other callers must see it too
        engine.fail(f"{type(error).__name__}: {error}")
        raise
    assert busy or any(call.finished for call in calls), "an idle engine with requests that have not ended"


def _cancel(engine: Engine, calls: Sequence[_Call]) -> None:
    for call in calls:
        if call.request_id >= 0 and call.finished is None:
            engine.cancel(call.request_id)


def _check_finished(last: Delta) -> None:
    if last.finish_reason in ("error", "cancelled"):
        raise EngineError(
            last.error or "a request that was cancelled", "a request that finishes", "open the artifact again"
        )


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C takes effect after the block: an engine that is interrupted inside a step cannot go on."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield  # Python delivers signals to the main thread; a handler that is not Python's cannot be put back
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)

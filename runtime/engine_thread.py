"""Runs an engine on a thread of its own: sleeps while idle, wakes on submit, stops cleanly."""

from __future__ import annotations

import threading

from flexspec.runtime.api import EngineLoad, OnDelta
from flexspec.runtime.engine import Engine
from flexspec.sampling import SamplingParams


class EngineThread:
    """EngineClient over an :class:`Engine`; ``close`` ends what is in flight with finish_reason "cancelled"."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="flexspec-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt_ids: list[int], params: SamplingParams, on_delta: OnDelta) -> int:
        request_id = self._engine.submit(prompt_ids, params, on_delta)
        self._wake.set()
        return request_id

    def cancel(self, request_id: int) -> None:
        self._engine.cancel(request_id)
        self._wake.set()

    def last_step_age_s(self) -> float:
        return self._engine.last_step_age_s()

    def load(self) -> EngineLoad:
        return self._engine.load()

    def close(self) -> None:
        """Stop after the current step. Idempotent."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stopping:
            self._wake.clear()  # before the step: a submit during it leaves the flag set
            try:
                busy = self._engine.step()
            except Exception as error:  # our own bug: callers must hear of it, and health must turn red
                self._engine.fail(f"{type(error).__name__}: {error}")
                raise
            if not busy:
                self._wake.wait()
        self._engine.stop()

"""Steps an engine on a thread of its own: sleeps while there is nothing to do, stops cleanly."""

from __future__ import annotations

import threading

from flexspec.runtime.engine.engine import Engine


class EngineThread:
    """``close`` ends what is in flight with finish_reason "cancelled"."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stopping = False
        self._failure = ""
        self._thread = threading.Thread(target=self._loop, name="flexspec-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the current step. Idempotent."""
        self._stopping = True
        self._engine.wanted.set()
        self._thread.join()

    def fail(self, reason: str) -> None:
        """Have the engine end everything with an error after the current step. Thread-safe; does not wait."""
        self._failure = reason
        self._engine.wanted.set()

    def _loop(self) -> None:
        while True:
            self._engine.wanted.clear()  # before the step: what comes during it leaves the event set
            if self._stopping:  # after the clear, which may have wiped out close's
                break
            if self._failure:
                self._engine.fail(self._failure)
                self._failure = ""
            try:
                busy = self._engine.step()
            except Exception as error:  # our own bug: callers must see it, and health must turn red
                self._engine.fail(f"{type(error).__name__}: {error}")
                raise
            if not busy:
                self._engine.wanted.wait()
        self._engine.stop()

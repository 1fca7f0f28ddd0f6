"""The state of a shutdown: which answers are still running, and whether new ones start. For the event loop only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Drain:
    """First ``begin`` (no new requests; running answers go on), then ``expire`` (running answers are cut)."""

    def __init__(self) -> None:
        self.started = False
        self.expired = False
        self._cuts: dict[int, Callable[[], None]] = {}
        self._next = 0

    def begin(self) -> None:
        """Accept no new requests from now on."""
        self.started = True

    def expire(self) -> None:
        """The grace period is over: cut all running answers."""
        self.started = self.expired = True
        for cut in list(self._cuts.values()):
            cut()

    @contextmanager
    def cutting(self, cut: Callable[[], None]) -> Iterator[None]:
        """Have ``cut`` called if the grace period ends inside this block."""
        key, self._next = self._next, self._next + 1
        self._cuts[key] = cut
        if self.expired:
            cut()
        try:
            yield
        finally:
            del self._cuts[key]

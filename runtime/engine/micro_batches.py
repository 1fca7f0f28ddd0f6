"""Running requests divided into micro-batches, so that several steps can be in flight at once.

One micro-batch is the rule; a plan with pipeline stages or SSMs on devices of their own uses more. Owns which request
belongs to which, and nothing of what a step does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flexspec.arithmetic import ceil_div
from flexspec.compiler.artifact.plan import MAX_MICRO_BATCHES
from flexspec.runtime.engine.round import Round
from flexspec.runtime.engine.scheduler import Running


@dataclass(slots=True, eq=False)
class MicroBatch:
    """Requests whose rows travel together, and their round from its draft to its results (None: between rounds)."""

    members: list[Running] = field(default_factory=list)
    round: Round | None = None


class MicroBatches:
    """``count_for(requests)`` is the plan's number of micro-batches for so many running requests."""

    def __init__(self, count_for: Callable[[int], int]) -> None:
        self._count_for = count_for
        self._all: list[MicroBatch] = [MicroBatch()]

    def add(self, running: Running) -> None:
        """Add an admitted request, which takes part from the next round of its micro-batch on."""
        self._active(self._requests() + 1)
        self._smallest().members.append(running)

    def remove(self, running: Running) -> None:
        """Remove a request that has ended; its rows in a step in flight are ignored."""
        for batch in self._all:
            if running in batch.members:
                batch.members.remove(running)

    def idle(self) -> list[MicroBatch]:
        """Micro-batches that can begin a round, balanced with each other."""
        requests = self._requests()
        active = self._active(requests)
        idle = [batch for batch in self._all if batch.round is None]
        share = ceil_div(requests, active)
        for batch in idle:
            most = share if batch in self._all[:active] else 0
            while len(batch.members) > most:
                self._smallest(active).members.append(batch.members.pop())
        self._all = self._all[:active] + [batch for batch in self._all[active:] if batch.round or batch.members]
        return [batch for batch in idle if batch.members]

    def clear(self) -> None:
        """Forget all rounds in flight: their results will not come."""
        for batch in self._all:
            batch.round = None

    def _requests(self) -> int:
        return sum(len(batch.members) for batch in self._all)

    def _active(self, requests: int) -> int:
        """How many micro-batches there are now, at least one."""
        count = max(1, min(self._count_for(requests), requests, MAX_MICRO_BATCHES))
        while len(self._all) < count:
            self._all.append(MicroBatch())
        return count

    def _smallest(self, active: int | None = None) -> MicroBatch:
        return min(self._all[:active], key=lambda batch: len(batch.members))

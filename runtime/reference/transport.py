"""Exchanges between ranks of one process: a table of the ranks that have arrived, and two ways to wait at it.

An exchange is computed by its record's reference, over the operands of all ranks in the group's order: the oracle for
every transport that sends messages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flexspec.compiler.partition.check_ranks import Meeting, meeting_of
from flexspec.errors import EngineError
from flexspec.graph import Node
from flexspec.kernels.reference import Walk
from flexspec.ops.record import record_of

Tensors = dict[str, torch.Tensor]
Results = tuple[torch.Tensor, ...]


class MeetingTable:
    """The ranks that have arrived at each exchange of a step. ``count``: finished exchanges, a group counted once."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self._arrived: dict[tuple[Meeting, int], dict[int, tuple[Node, Sequence[torch.Tensor]]]] = {}
        self._times: dict[tuple[Meeting, int], int] = {}  # how often a rank came to a meeting of this description

    def meet(self, rank: int, node: Node, operands: Sequence[torch.Tensor]) -> list[tuple[int, Results]]:
        """Take a rank's operands; if it is the last of its group, return the results of all that can continue."""
        meeting = meeting_of(rank, node)
        number = self._times[meeting, rank] = self._times.get((meeting, rank), 0) + 1
        arrived = self._arrived.setdefault((meeting, number), {})
        arrived[rank] = node, operands
        if len(arrived) < len(meeting.ranks):
            return []
        del self._arrived[meeting, number]
        self.count[meeting.kind] = self.count.get(meeting.kind, 0) + 1
        first = arrived[meeting.ranks[0]][0]
        together = [tensor for member in meeting.ranks for tensor in arrived[member][1]]
        results = record_of(first).reference(together, dict(first.attrs))
        return [(member, results) for member in meeting.ranks]

    def waiting(self) -> str:
        """The waiting ranks, for a message."""
        shown = [
            f"{sorted(ranks)} at {meeting.kind} of {meeting.ranks}" for (meeting, _), ranks in self._arrived.items()
        ]
        return "; ".join(shown) or "nobody"


def run_ranks(walks: Mapping[int, Walk], table: MeetingTable) -> dict[int, Tensors]:
    """The outputs of all ranks, run in turn. Raises EngineError on a deadlock."""
    outputs: dict[int, Tensors] = {}
    ready: deque[tuple[int, Results | None]] = deque((rank, None) for rank in walks)
    while ready:
        rank, results = ready.popleft()
        try:
            node, operands = walks[rank].send(results) if results is not None else next(walks[rank])
        except StopIteration as done:
            outputs[rank] = done.value
            continue
        ready.extend(table.meet(rank, node, operands))
    if len(outputs) < len(walks):
        raise _stuck(table)
    return outputs


class ThreadMeetings:
    """The table for ranks in threads of their own. When one fails, ``cause`` is its error, and ranks that wait get an
    EngineError."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.table = MeetingTable()
        self.cause: BaseException | None = None
        self._timeout_s = timeout_s
        self._done: dict[int, Results] = {}
        self._changed = threading.Condition()

    def meet(self, rank: int, node: Node, operand: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """This rank's result of an exchange, once all have arrived. ``operand`` None: the rank contributes nothing."""
        tensor = torch.empty(0) if operand is None else torch.from_numpy(operand.copy())
        with self._changed:
            self._done.update(self.table.meet(rank, node, [tensor]))
            self._changed.notify_all()
            self._changed.wait_for(lambda: rank in self._done or self.cause is not None, self._timeout_s)
            if rank not in self._done:  # a result that is ready is taken, even if a rank has failed since
                raise _stuck(self.table)
            (result,) = self._done.pop(rank)
        return result.numpy()

    def give_up(self, cause: BaseException) -> None:
        """Record that a rank failed, and wake the others. The first cause counts, later ones follow from it."""
        with self._changed:
            self.cause = self.cause or cause
            self._changed.notify_all()


def _stuck(table: MeetingTable) -> EngineError:
    return EngineError(
        f"ranks that wait for others: {table.waiting()}",
        "exchanges that all ranks of a group reach in the same order",
        "run the parts of all ranks of one plan; another rank's error may be the cause",
    )

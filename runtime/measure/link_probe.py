"""One rank of a link measurement over torch.distributed, run as ``python -m flexspec.runtime.measure.link_probe``.

Times the runtime's own exchanges (distributed/group.py: Seat.meet), each after a stretch of work, as in a step: waiting
threads have gone to sleep by then, and a ping-pong that keeps them awake would show half the time. Every rank prints
JSON; ``probe_links`` starts all ranks and combines their output.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flexspec.errors import ToolchainError
from flexspec.graph import Node, Value
from flexspec.runtime.distributed.processes import RanksFailed, start_ranks, this_rank
from flexspec.runtime.executors.cpu_rank import Meet
from flexspec.runtime.executors.step_times import lower_quartile
from flexspec.types import DType, Role, TensorType

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)  # bytes
_COLUMNS = 256  # float32, of a row
_ROW_BYTES = 4 * _COLUMNS
_WORK_BYTES = 1 << 22  # read between two sums
_STAGE_READS = 24  # so many times that between two transfers: about a stage's time, in which other ranks fall asleep
_REPEATS, _WARM, _TIMEOUT_S = 20, 4, 120
_CHAINS, _LINKS = 7, 12  # sums come in chains, two per block: what matters is the mean of a chain, late ones included


def probe_links(ranks: int) -> tuple[dict[int, float], dict[int, float]]:
    """(transfers, all-reduces): bytes -> us between ``ranks`` processes. Raises ToolchainError without torch."""
    with start_ranks("flexspec.runtime.measure.link_probe", [], ranks) as processes:
        try:
            outputs = processes.finish(_TIMEOUT_S)
        except RanksFailed as error:
            raise ToolchainError(
                f"links could not be measured: {error}", "torch with gloo over loopback", "install torch, or --no-links"
            ) from None
    answers = [json.loads(output) for output in outputs]
    transfers = {size: transfer_us([answer["transfer"][str(size)] for answer in answers[:2]]) for size in SIZES}
    reduces = {size: reduce_us([answer["reduce"][str(size)] for answer in answers]) for size in SIZES}
    return transfers, reduces


def transfer_us(moments_ns: list[list[int]]) -> float:
    """From the sender's begin to the receiver's end; rank 0 sends first, then they alternate. A host has one clock."""
    first, second = (np.array(moments, np.int64) for moments in moments_ns)
    return lower_quartile(np.abs(first - second) / 1e3)


def reduce_us(spent_us: list[list[float]]) -> float:
    """What a rank spends in each sum of a chain, waiting for the others included."""
    return lower_quartile(np.mean(spent_us, 0).reshape(_CHAINS, _LINKS).mean(1))


@dataclass(slots=True)
class LinkProbe:
    """One rank's side of the measurement."""

    rank: int
    ranks: tuple[int, ...]
    meet: Meet  # the exchange of the runtime
    clock_ns: Callable[[], int] = time.monotonic_ns  # one clock for all ranks of the host

    def transfer(self, rows: int) -> list[int]:
        """When this rank began to send, or had received, in ns."""
        moments = []
        data = np.ones((rows, _COLUMNS), np.float32)
        for i in range(_WARM + 2 * _REPEATS):
            sender, receiver = (0, 1) if i % 2 == 0 else (1, 0)
            if self.rank == sender:
                for _ in range(_STAGE_READS):
                    _work()
                moments.append(self.clock_ns())
                self.meet(self.rank, _node("send", to=receiver, channel=0), data)
            elif self.rank == receiver:
                self.meet(self.rank, _node("recv", source=sender, channel=0), None)
                moments.append(self.clock_ns())
        return moments[_WARM:]

    def reduce(self, rows: int) -> list[float]:
        """Microseconds in each sum."""
        spent = []
        data = np.ones((rows, _COLUMNS), np.float32)
        for _ in range(_WARM + _CHAINS * _LINKS):
            _work()
            began = self.clock_ns()
            self.meet(self.rank, _node("reduce", ranks=self.ranks), data)
            spent.append((self.clock_ns() - began) / 1e3)
        return spent[_WARM:]


_MEMORY = np.ones(_WORK_BYTES // 4, np.float32)


def _work() -> None:
    """A rank's work between exchanges: read memory."""
    float(_MEMORY.sum())


def _node(op: str, **attrs: int | tuple[int, ...]) -> Node:
    result = Value("x", TensorType(DType.F32, ("T", _COLUMNS), Role.ACTIVATION))
    return Node(op, ("x",), (result,), tuple(sorted(attrs.items())))


def main() -> None:
    from flexspec.runtime.distributed.agreement import Agreement
    from flexspec.runtime.distributed.group import Seat

    world = this_rank().ranks
    seat = Seat(Agreement(artifact="link probe"), world, [tuple(range(world))])
    probe = LinkProbe(seat.rank, tuple(range(world)), seat.meet)
    body: dict[str, dict[int, list[int] | list[float]]] = {"transfer": {}, "reduce": {}}
    for size in SIZES:
        rows = size // _ROW_BYTES
        seat.begin(rows, rows)
        body["transfer"][size] = probe.transfer(rows)
        body["reduce"][size] = probe.reduce(rows)
    print(json.dumps(body))
    seat.close()


if __name__ == "__main__":
    main()

"""This process's seat among the ranks of a plan: torch.distributed groups, and the exchanges that programs ask for.

Each rank sums in rank order, never around a ring: a row's result must not depend on how many rows are in the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from flexspec.errors import PlanError
from flexspec.graph import Attr, Node, as_int
from flexspec.kernels.cpu.launch import Rows
from flexspec.ops.record import Collective, record_of
from flexspec.runtime.distributed.agreement import Agreement, check_agreement
from flexspec.runtime.distributed.processes import this_rank
from flexspec.runtime.distributed.watch import PeerWatch

Scalar = TypeVar("Scalar", bound=np.generic)
Attrs = Mapping[str, Attr]
STEP_TIMEOUT_S = 120  # for a rank that is alive and silent; one that died closes its connections at once
_START_TIMEOUT_S = 300
_IDLE_TIMEOUT = timedelta(days=365)  # ranks wait for the next message as long as there are no requests
_MAX_IN_FLIGHT = 1024  # sends at a time; more than all micro-batches in flight need
RESULTS, ANSWERS, SHARES = 1 << 20, 1 << 21, 1 << 22  # tags, apart from the channels of the graphs


class Outbox:
    """Non-blocking sends: a rank goes on while its tensors are in flight, and keeps them alive until they are sent.

    With blocking sends, two ranks that send to each other would deadlock, and pipeline stages would run in turn.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._in_flight: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> None:
        """Raises RuntimeError (torch's own) when the other rank is gone."""
        work = dist.isend(tensor, to, self._group, tag)
        assert work is not None
        self._in_flight.append((work, tensor))
        while len(self._in_flight) > _MAX_IN_FLIGHT:
            self._in_flight.popleft()[0].wait()

    def flush(self) -> None:
        """Wait until everything has been read."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()


class Seat:
    """A rank that has joined the others.

    ``control`` carries rank 0's messages and ``answers`` what comes back, both in host memory (gloo); ``steps`` and the
    plan's groups carry rows, by the device's backend.
    """

    def __init__(
        self, agreement: Agreement, world: int, groups: Sequence[tuple[int, ...]], backend: str = "gloo"
    ) -> None:
        """Join, and compare ``agreement`` with all ranks.

        ``groups`` are all groups of the plan, the same on each rank; ``backend`` is torch.distributed's, for rows.
        Raises PlanError for another number of ranks, ArtifactError when ranks differ, RuntimeError when they do not
        find each other.
        """
        ranks = this_rank().ranks
        if ranks != world:
            raise PlanError(f"{ranks} ranks", f"{world}, as the artifact's plan has", f"start it with --ranks {world}")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=_START_TIMEOUT_S))
        self.rank, self.world = dist.get_rank(), world
        check_agreement(self._gather_sides(agreement.encode()))
        self._sizes: Mapping[str, int] = {}
        everyone, limit = list(range(world)), timedelta(seconds=STEP_TIMEOUT_S)
        self._direct = backend == "gloo"
        self.control = dist.new_group(everyone, timeout=_IDLE_TIMEOUT)
        self.answers = dist.new_group(everyone, timeout=limit)
        self.steps = dist.new_group(everyone, timeout=limit, backend=backend)
        self._groups = {tuple(group): dist.new_group(list(group), limit, backend) for group in groups}
        self.peers = PeerWatch(self.rank, world, self.control)  # last: it notes all connections made so far
        self.commands, self._replies, self._rows = Outbox(self.control), Outbox(self.answers), Outbox(self.steps)

    def _gather_sides(self, side: bytes) -> list[bytes]:
        """Each rank's bytes, by rank; their lengths may differ."""
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(lengths, torch.tensor([len(side)]))
        longest = max(int(length) for length in lengths)
        sides = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(sides, torch.frombuffer(bytearray(side.ljust(longest, b"\0")), dtype=torch.uint8))
        return [bytes(text[: int(length)].tolist()) for text, length in zip(sides, lengths, strict=True)]

    def listen(self, array: NDArray[Scalar]) -> NDArray[Scalar]:
        """Fill an array from rank 0's next message, however long that takes."""
        dist.recv(torch.from_numpy(array), 0, self.control)
        return array

    def receive(self, array: NDArray[Scalar], source: int, tag: int) -> NDArray[Scalar]:
        """Fill an array with the next answer of that tag."""
        dist.recv(torch.from_numpy(array), source, self.answers, tag)
        return array

    def expect(self, array: NDArray[np.generic], source: int, tag: int) -> dist.Work:
        """Begin to fill an array with a later answer."""
        work = dist.irecv(torch.from_numpy(array), source, self.answers, tag)
        assert work is not None
        return work

    def answer(self, array: NDArray[np.generic], tag: int) -> None:
        """Send an answer to rank 0."""
        self._replies.send(torch.from_numpy(array), 0, tag)

    def begin(self, rows: int, logit_rows: int) -> None:
        """Set the dims T and L of the step that follows: a rank that receives must know them."""
        self._sizes = {"T": rows, "L": logit_rows}

    def meet(self, rank: int, node: Node, operand: Rows | None) -> Rows:
        """``exchange`` for rows of the CPU programs, float32 [n, columns] (runtime/executors/cpu_rank.py: Meet)."""
        assert rank == self.rank
        tensor = None if operand is None else torch.from_numpy(np.array(operand))
        rows: Rows = self.exchange(node, tensor, torch.float32).flatten(1).numpy()
        return rows

    def exchange(
        self, node: Node, operand: torch.Tensor | None, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Do an exchange and return what this rank receives (for a send: what it sent), in the node's shape.

        ``operand``: the rank's rows, if it contributes any; ``dtype`` and ``device`` are those of the exchanged rows.
        Raises RuntimeError (torch's own) when another rank is gone or silent.
        """
        attrs, dims = dict(node.attrs), node.outputs[0].type.dims
        shape = (self._sizes[str(dims[0])], *(dim for dim in dims[1:] if isinstance(dim, int)))
        if not shape[0]:
            return torch.empty(shape, dtype=dtype, device=device)
        if operand is None:
            rows = torch.empty((shape[0], prod(shape[1:])), dtype=dtype, device=device)
        else:
            assert len(operand) == shape[0], "all ranks see the same step"
            rows = operand.reshape(shape[0], -1).contiguous()
        collective = record_of(node).collective
        if collective is Collective.SEND:
            self._rows.send(rows, as_int(attrs["to"]), as_int(attrs["channel"]))
        elif collective is Collective.RECV:
            dist.recv(rows, as_int(attrs["source"]), self.steps, as_int(attrs["channel"]))
        elif collective is Collective.BROADCAST:
            dist.broadcast(rows, as_int(attrs["root"]), self._groups[_members(attrs)])
        elif collective is Collective.ALL_REDUCE:
            rows = sum_in_order(self._gather(rows, attrs))
        else:
            rows = self._combine(rows, attrs)
        return rows.reshape(shape)

    def _gather(self, rows: torch.Tensor, attrs: Attrs) -> list[torch.Tensor]:
        """The tensors of all members, of one shape, in the order in which the operator names them.

        Gloo's gather hands each call to a thread and back; direct sends to all members took half the time.
        """
        members = _members(attrs)
        if self._direct:
            shares = {member: rows if member == self.rank else torch.empty_like(rows) for member in members}
            others = [member for member in members if member != self.rank]
            for member in others:
                self._rows.send(rows, member, SHARES)
            for member in others:
                dist.recv(shares[member], member, self.steps, SHARES)
        else:
            gathered = [torch.empty_like(rows) for _ in members]
            dist.all_gather(gathered, rows, self._groups[members])
            shares = dict(zip(members, gathered, strict=True))
        ranks = attrs["ranks"]
        assert isinstance(ranks, tuple)
        return [shares[as_int(rank)] for rank in ranks]

    def _combine(self, rows: torch.Tensor, attrs: Attrs) -> torch.Tensor:
        """Columns of all ranks joined. Gloo gathers equal sizes only: shorter shares are padded with zeros."""
        sizes = attrs["sizes"]
        assert attrs["dim"] == 1 and isinstance(sizes, tuple), "rows are never cut"
        inner = rows.shape[1] // as_int(sizes[as_int(attrs["part"])])
        columns = [as_int(size) * inner for size in sizes]
        padded = torch.nn.functional.pad(rows, (0, max(columns) - rows.shape[1]))
        return torch.cat([x[:, :n] for x, n in zip(self._gather(padded, attrs), columns, strict=True)], 1)

    def close(self) -> None:
        """Leave, once everything this rank sent has been read. Raises RuntimeError when a rank is gone."""
        self.peers.close()
        for outbox in (self.commands, self._replies, self._rows):
            outbox.flush()
        dist.destroy_process_group()


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float32, rounded once to the parts' dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def _members(attrs: Attrs) -> tuple[int, ...]:
    ranks = attrs["ranks"]
    assert isinstance(ranks, tuple)
    return tuple(sorted(as_int(rank) for rank in ranks))

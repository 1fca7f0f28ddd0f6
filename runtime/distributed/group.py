"""This process's seat among the ranks of a plan: torch.distributed groups, and the exchanges that programs ask for.

A sum is taken in rank order on each rank, never around a ring: the result of a row must not depend on how many rows are
in the step.
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
_IDLE_TIMEOUT = timedelta(days=365)  # ranks wait for the next message as long as nobody asks for anything
_UNREAD = 1024  # sends at a time that may be on their way; more than all micro-batches in flight can make
RESULTS, ANSWERS, SHARES = 1 << 20, 1 << 21, 1 << 22  # tags beside the channels of the graphs


class Outbox:
    """Sends that nobody waits for: a rank goes on while its bytes are on their way, and keeps them until then.

    Were they waited for, two ranks that send to each other would deadlock, and pipeline stages would run in turn.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._on_way: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> None:
        """Raises RuntimeError (torch's own) when the other rank is gone."""
        work = dist.isend(tensor, to, self._group, tag)
        assert work is not None
        self._on_way.append((work, tensor))
        while len(self._on_way) > _UNREAD:
            self._on_way.popleft()[0].wait()

    def flush(self) -> None:
        """Until all has been read."""
        while self._on_way:
            self._on_way.popleft()[0].wait()


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
        found = this_rank().ranks
        if found != world:
            raise PlanError(f"{found} ranks", f"{world}, as the artifact's plan has", f"start it with --ranks {world}")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=_START_TIMEOUT_S))
        self.rank, self.world = dist.get_rank(), world
        check_agreement(self._everyones(agreement.encode()))
        self._sizes: Mapping[str, int] = {}
        everyone, limit = list(range(world)), timedelta(seconds=STEP_TIMEOUT_S)
        self._straight = backend == "gloo"
        self.control = dist.new_group(everyone, timeout=_IDLE_TIMEOUT)
        self.answers = dist.new_group(everyone, timeout=limit)
        self.steps = dist.new_group(everyone, timeout=limit, backend=backend)
        self._groups = {tuple(group): dist.new_group(list(group), limit, backend) for group in groups}
        self.peers = PeerWatch(self.rank, world, self.control)  # once all connections are made
        self.commands, self._replies, self._rows = Outbox(self.control), Outbox(self.answers), Outbox(self.steps)

    def _everyones(self, side: bytes) -> list[bytes]:
        """What each rank gave, by rank; texts may differ in length."""
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(lengths, torch.tensor([len(side)]))
        longest = max(int(length) for length in lengths)
        sides = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(sides, torch.frombuffer(bytearray(side.ljust(longest, b"\0")), dtype=torch.uint8))
        return [bytes(text[: int(length)].tolist()) for text, length in zip(sides, lengths, strict=True)]

    def listen(self, array: NDArray[Scalar]) -> NDArray[Scalar]:
        """Fill an array from rank 0's next message, however long it takes."""
        dist.recv(torch.from_numpy(array), 0, self.control)
        return array

    def receive(self, array: NDArray[Scalar], source: int, tag: int) -> NDArray[Scalar]:
        """Fill an array with the next answer of that tag."""
        dist.recv(torch.from_numpy(array), source, self.answers, tag)
        return array

    def expect(self, array: NDArray[np.generic], source: int, tag: int) -> dist.Work:
        """Begin to fill an array with an answer that is still to come."""
        work = dist.irecv(torch.from_numpy(array), source, self.answers, tag)
        assert work is not None
        return work

    def answer(self, array: NDArray[np.generic], tag: int) -> None:
        """Send an answer to rank 0."""
        self._replies.send(torch.from_numpy(array), 0, tag)

    def begin(self, rows: int, logit_rows: int) -> None:
        """What the dims T and L are in the step that follows: a rank that receives must know it."""
        self._sizes = {"T": rows, "L": logit_rows}

    def meet(self, rank: int, node: Node, given: Rows | None) -> Rows:
        """``exchange`` for rows of the CPU programs, float32 [n, columns] (runtime/executors/cpu_rank.py: Meet)."""
        assert rank == self.rank
        result = self.exchange(node, None if given is None else torch.from_numpy(np.array(given)), torch.float32)
        rows: Rows = result.flatten(1).numpy()
        return rows

    def exchange(
        self, node: Node, operand: torch.Tensor | None, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Do an exchange and return what this rank gets (of a send: what it gave), of the node's shape.

        ``operand``: the rank's rows, if it has any to give; ``dtype`` and ``device`` are those of rows that travel.
        Raises RuntimeError (torch's own) when another rank is gone or silent.
        """
        attrs, dims = dict(node.attrs), node.outputs[0].type.dims
        shape = (self._sizes[str(dims[0])], *(dim for dim in dims[1:] if isinstance(dim, int)))
        if not shape[0]:
            return torch.empty(shape, dtype=dtype, device=device)
        if operand is None:
            own = torch.empty((shape[0], prod(shape[1:])), dtype=dtype, device=device)
        else:
            assert len(operand) == shape[0], "all ranks see the same step"
            own = operand.reshape(shape[0], -1).contiguous()
        collective = record_of(node).collective
        if collective is Collective.SEND:
            self._rows.send(own, as_int(attrs["to"]), as_int(attrs["channel"]))
        elif collective is Collective.RECV:
            dist.recv(own, as_int(attrs["source"]), self.steps, as_int(attrs["channel"]))
        elif collective is Collective.BROADCAST:
            dist.broadcast(own, as_int(attrs["root"]), self._groups[_members(attrs)])
        elif collective is Collective.ALL_REDUCE:
            own = sum_in_order(self._gather(own, attrs))
        else:
            own = self._combine(own, attrs)
        return own.reshape(shape)

    def _gather(self, own: torch.Tensor, attrs: Attrs) -> list[torch.Tensor]:
        """The tensors of all members, of one shape, in the order in which the operator names them.

        Gloo's own gather hands each call to a thread and back; straight sends to all members took half of its time.
        """
        members = _members(attrs)
        if self._straight:
            shares = {member: own if member == self.rank else torch.empty_like(own) for member in members}
            others = [member for member in members if member != self.rank]
            for member in others:
                self._rows.send(own, member, SHARES)
            for member in others:
                dist.recv(shares[member], member, self.steps, SHARES)
        else:
            gathered = [torch.empty_like(own) for _ in members]
            dist.all_gather(gathered, own, self._groups[members])
            shares = dict(zip(members, gathered, strict=True))
        ranks = attrs["ranks"]
        assert isinstance(ranks, tuple)
        return [shares[as_int(rank)] for rank in ranks]

    def _combine(self, own: torch.Tensor, attrs: Attrs) -> torch.Tensor:
        """Columns of all ranks joined. Gloo gathers equal sizes only: shorter shares travel with zeros behind them."""
        sizes = attrs["sizes"]
        assert attrs["dim"] == 1 and isinstance(sizes, tuple), "rows are never cut"
        inner = own.shape[1] // as_int(sizes[as_int(attrs["part"])])
        columns = [as_int(size) * inner for size in sizes]
        padded = torch.nn.functional.pad(own, (0, max(columns) - own.shape[1]))
        return torch.cat([x[:, :n] for x, n in zip(self._gather(padded, attrs), columns, strict=True)], 1)

    def close(self) -> None:
        """Leave, once what this rank has sent was read. Raises RuntimeError when a rank is gone."""
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

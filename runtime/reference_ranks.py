"""All ranks of a partitioned model in one process, on the torch references: the oracle for every distributed run.

The transport is a table: a rank runs until it has to wait for another, then the next one does. Exchanges are computed
by their records' references, in the order of their groups, so that a run is the same every time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flexspec.compiler.partition import RankPart
from flexspec.compiler.shares import cut_weights
from flexspec.errors import EngineError
from flexspec.graph import Node
from flexspec.kernels.reference import Exchange, Walk, walk_graph
from flexspec.ops.record import record_of
from flexspec.runtime.reference_executor import empty_caches, move_slots, step_result, step_tensors, weight_tensors
from flexspec.runtime.step import StepBatch, StepResult
from flexspec.runtime.top_successors import top_successors

Tensors = dict[str, torch.Tensor]
Meeting = tuple[object, ...]  # what tells one exchange from all others of a step


class ReferenceRanks:
    """An Executor (runtime/step.py) over the parts of all ranks; every rank has a pool of its own.

    ``get(name)`` gives a whole weight of the model in float32. Raises WeightError.
    """

    def __init__(
        self, parts: Sequence[RankPart], get: Callable[[str], NDArray[np.float32]], pages: int, max_rows: int
    ) -> None:
        self.parts, self.pages, self.max_rows = parts, pages, max_rows
        last = [part for part in parts if part.results]
        vocab = last[0].graph.types()[last[0].graph.outputs[0]].dims[1]
        assert isinstance(vocab, int)
        self.vocab_size = vocab
        nodes = [node for part in parts for node in part.graph.nodes]
        limits = [node.attr("max_positions") for node in nodes if node.op == "rope"]
        self.max_positions = min((limit for limit in limits if isinstance(limit, int)), default=2**31 - 1)
        self._weights = {part.rank: weight_tensors(part.graph, cut_weights(part.weights, get)) for part in parts}
        self._caches = {part.rank: empty_caches(part.graph, pages) for part in parts}
        self.traffic: dict[str, int] = {}  # exchanges of the last step by operator, a group counted once

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        """One step of all ranks. Raises EngineError when ranks wait for one another for ever, or disagree."""
        assert 0 < len(batch.ids_T) <= self.max_rows, f"{len(batch.ids_T)} rows, at most {self.max_rows}"
        outputs = self._run(batch)
        for part in self.parts:
            caches = self._caches[part.rank]
            names = part.graph.outputs[len(part.graph.outputs) - len(caches) :]
            for name, new in zip(list(caches), names, strict=True):
                caches[name] = outputs[part.rank][new]
        wanted = [[outputs[p.rank][name] for name in p.graph.outputs[: p.results]] for p in self.parts if p.results]
        if any(not torch.equal(a, b) for other in wanted[1:] for a, b in zip(wanted[0], other, strict=True)):
            raise EngineError("ranks of the last stage that differ in their results", "one result", "report this fault")
        logits, *features = wanted[0]
        return step_result(logits, features, want_logits, want_features)

    def _run(self, batch: StepBatch) -> dict[int, Tensors]:
        walks: dict[int, Walk] = {}
        for part in self.parts:
            inputs = {**step_tensors(part.graph, batch), **self._weights[part.rank], **self._caches[part.rank]}
            walks[part.rank] = walk_graph(part.graph, inputs)
        transport = _Transport()
        outputs = run_ranks(walks, transport)
        self.traffic = transport.count
        return outputs

    def top_successors(self, logits_LV: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return top_successors(logits_LV, k)

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        """Copy K/V of all layers slot by slot, in order, on every rank."""
        for caches in self._caches.values():
            for cache in caches.values():
                move_slots(cache, src_slots, dst_slots)

    def read_kv(self, rank: int) -> Mapping[str, torch.Tensor]:
        """The caches of one rank; for tests."""
        return self._caches[rank]

    def close(self) -> None:
        """Drop the pools and the weights."""
        self._caches.clear()
        self._weights.clear()


def run_ranks(walks: Mapping[int, Walk], transport: _Transport) -> dict[int, Tensors]:
    """The outputs of all ranks. Raises EngineError when all that are left wait."""
    outputs: dict[int, Tensors] = {}
    ready: deque[tuple[int, tuple[torch.Tensor, ...] | None]] = deque((rank, None) for rank in walks)
    while ready:
        rank, results = ready.popleft()
        try:
            exchange = walks[rank].send(results) if results is not None else next(walks[rank])
        except StopIteration as done:
            outputs[rank] = done.value
            continue
        ready.extend(transport.meet(rank, exchange))
    if len(outputs) < len(walks):
        raise EngineError(
            f"ranks {sorted(walks.keys() - outputs.keys())} wait for others: {transport.waiting()}",
            "exchanges that all ranks of a group reach in the same order",
            "partition the graph again; parts of two plans do not fit",
        )
    return outputs


class _Transport:
    """Who has arrived at which exchange of a step."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self._arrived: dict[Meeting, dict[int, Exchange]] = {}
        self._done: dict[tuple[object, ...], int] = {}  # meetings of a group by rank, so that the next one is another

    def meet(self, rank: int, exchange: Exchange) -> list[tuple[int, tuple[torch.Tensor, ...]]]:
        """Take a rank's operands; give the results to all who can go on."""
        node, _ = exchange
        members = _members(rank, node)
        kind = "hop" if node.op in ("send", "recv") else node.op
        channel = (dict(node.attrs)["channel"],) if kind == "hop" else ()
        key = (kind, members, *channel)
        number = self._done[key, rank] = self._done.get((key, rank), 0) + 1
        arrived = self._arrived.setdefault((key, number), {})
        arrived[rank] = exchange
        if len(arrived) < len(members):
            return []
        del self._arrived[key, number]
        self.count[kind] = self.count.get(kind, 0) + 1
        node = arrived[members[0]][0]
        operands = [tensor for member in members for tensor in arrived[member][1]]
        results = record_of(node).reference(operands, dict(node.attrs))
        return [(member, results) for member in members]

    def waiting(self) -> str:
        return "; ".join(f"{key} has {sorted(arrived)}" for (key, _), arrived in self._arrived.items()) or "nobody"


def _members(rank: int, node: Node) -> tuple[int, ...]:
    """The ranks of an exchange; of a hop the sender, then the receiver."""
    attrs = dict(node.attrs)
    if node.op == "send":
        return rank, _int(attrs["to"])
    if node.op == "recv":
        return _int(attrs["source"]), rank
    ranks = attrs["ranks"]
    assert isinstance(ranks, tuple)
    return tuple(_int(each) for each in ranks)


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value

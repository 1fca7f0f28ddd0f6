"""All ranks of a partitioned model in one process, on the torch references: the oracle for every distributed run.

A rank runs until it has to wait for another, then the next one runs (reference/transport.py). Nothing depends on
timing, so every run is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flexspec.compiler.partition.rank_part import RankPart
from flexspec.compiler.partition.shares import cut_weights
from flexspec.errors import EngineError
from flexspec.kernels.reference import Walk, walk_graph
from flexspec.ops.bounds import IDS, POSITIONS, input_bound
from flexspec.runtime.executors.step import StepBatch, StepResult
from flexspec.runtime.executors.step_rules import check_step
from flexspec.runtime.executors.top_successors import top_successors
from flexspec.runtime.reference.executor import empty_caches, move_slots, step_result, step_tensors, weight_tensors
from flexspec.runtime.reference.transport import MeetingTable, Tensors, run_ranks


class ReferenceRanks:
    """An Executor (runtime/executors/step.py) over the parts of all ranks; every rank has a pool of its own.

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
        self.max_positions = min(input_bound(part.graph, POSITIONS) for part in parts)
        self._id_rows = min(input_bound(part.graph, IDS) for part in parts)
        self._weights = {part.rank: weight_tensors(part.graph, cut_weights(part.weights, get)) for part in parts}
        self._caches = {part.rank: empty_caches(part.graph, pages) for part in parts}
        self.traffic: dict[str, int] = {}  # exchanges of the last step by operator, a group counted once

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        """One step of all ranks. Raises EngineError as one executor, and when ranks disagree or deadlock."""
        check_step(batch, self.max_rows, self.max_positions, self._id_rows)
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
        transport = MeetingTable()
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

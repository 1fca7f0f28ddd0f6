"""One rank of a partitioned model on the generated CPU backend: its program, its weights, its part of the KV pool.

Whoever runs the ranks hands in ``meet``, which does an exchange with the others: in threads of one process
(reference_threads.py), or by messages between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.partition import RankPart
from flexspec.graph import Node, Value
from flexspec.kernels.cpu_build import build_path, supported_isas
from flexspec.kernels.cpu_exchange import first_id, split_logits
from flexspec.kernels.cpu_launch import CpuLibrary
from flexspec.kernels.cpu_pack import pack
from flexspec.kernels.cpu_render import render
from flexspec.runtime.step import PAGE_TOKENS, StepBatch

Rows = NDArray[np.float32]
Meet = Callable[[int, Node, Rows | None], Rows]  # (rank, exchange, rows [n, columns] to give) -> rows that it gets


@dataclass(frozen=True, slots=True)
class RankResult:
    """Of a rank of the last stage: whole logits, and features if the model has them."""

    logits_LV: Rows
    features_TE: Rows | None


class CpuRank:
    """A lowered part, generated, built (cached) and packed for the best instruction set here.

    ``weights`` are the rank's own, by their names in its graph. Raises CompileError, ToolchainError, CapacityError.
    """

    def __init__(
        self, part: RankPart, weights: Mapping[str, Rows], *, pages: int, max_rows: int = 256, threads: int = 1
    ) -> None:
        self.part = part
        self._graph, self._join = split_logits(part.graph)
        self._types = self._graph.types()
        program = render(self._graph)
        library = build_path(program.source, supported_isas()[0])
        packed = [pack(entry, weights.__getitem__, program.dtype) for entry in program.weights]
        self._library = CpuLibrary(
            library, packed, threads=threads, max_rows=max_rows, pages=pages, max_positions=pages * PAGE_TOKENS
        )
        self.facts = self._library.facts

    def step(self, batch: StepBatch, meet: Meet, *, want_features: bool = True) -> RankResult | None:
        """One step; None from a rank that is not in the last stage. Raises what ``meet`` raises, and EngineError."""
        rows, wanted = len(batch.ids_T), len(batch.logit_rows_L)
        argmax = np.full(wanted, -1, np.int32)
        logits = np.empty((wanted, self.facts.outputs), np.float32) if self.facts.outputs else None
        columns = self.facts.feature_columns if want_features else 0
        features = np.empty((rows, columns), np.float32) if columns else None

        def on_exchange(index: int, source: Rows | None, target: Rows | None) -> None:
            node = self._graph.nodes[index]
            given = None if source is None else source[:, : self._columns(node.inputs[0])]
            result = meet(self.part.rank, node, given)
            if target is not None:
                target[:, : _columns_of(node.outputs[0])] = result

        arrays: dict[str, NDArray[np.generic] | None] = {
            "ids": batch.ids_T,
            "positions": batch.positions_T,
            "starts": batch.starts_R1,
            "contexts": batch.contexts_R,
            "page_table": batch.page_table_RB,
            "logit_rows": batch.logit_rows_L,
            "causal": batch.causal_R,
            "ancestors": batch.ancestors_TW,
            "features": batch.features_TE if self.facts.reads_features else None,
        }
        self._library.step(arrays, argmax, logits, features, on_exchange, first_id(self._graph))
        if logits is None:
            return None
        whole = logits if self._join is None else meet(self.part.rank, self._join, logits)
        return RankResult(whole, features)

    def _columns(self, name: str) -> int:
        return _columns_of(Value(name, self._types[name]))

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        """Copy K/V of this rank's layers and heads, slot by slot, in order."""
        self._library.move_kv(np.ascontiguousarray(src_slots, np.int32), np.ascontiguousarray(dst_slots, np.int32))

    def close(self) -> None:
        self._library.close()


def _columns_of(value: Value) -> int:
    return prod(dim for dim in value.type.dims[1:] if isinstance(dim, int))

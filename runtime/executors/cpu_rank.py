"""One rank of a partitioned model on the generated CPU backend: its program, its weights, its part of the KV pool.

The caller passes ``meet``, which does an exchange with the other ranks: in threads of one process
(reference/threads.py), or by messages between processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.partition.rank_part import RankPart
from flexspec.graph import Graph, Node, Value
from flexspec.kernels.cpu.build import build_path, supported_isas
from flexspec.kernels.cpu.exchange import first_rows, split_logits
from flexspec.kernels.cpu.launch import CpuLibrary, Rows
from flexspec.kernels.cpu.pack import pack
from flexspec.kernels.cpu.render import render
from flexspec.kv_slots import STEP_ROWS
from flexspec.runtime.executors.step import StepBatch, StepResult
from flexspec.runtime.executors.step_rules import best_L, program_arrays
from flexspec.runtime.executors.step_times import StepTimes
from flexspec.types import PAGE_TOKENS

Meet = Callable[[int, Node, Rows | None], Rows]  # (rank, exchange, rows [n, columns] to send) -> rows received


class CpuRank:
    """A lowered part, generated, built (cached) and packed for the best instruction set here.

    ``weights`` are the rank's own, by their names in its graph. Raises CompileError, ToolchainError, CapacityError.
    """

    def __init__(
        self, part: RankPart, weights: Mapping[str, Rows], *, pages: int, max_rows: int = STEP_ROWS, threads: int = 1
    ) -> None:
        program = render(split_logits(part.graph)[0])
        library = build_path(program.source, supported_isas()[0])
        packed = [pack(entry, weights.__getitem__) for entry in program.weights]
        self._open(part.rank, part.graph, library, packed, pages, max_rows, threads)

    @classmethod
    def built(
        cls,
        rank: int,
        graph: Graph,
        library: Path,
        packed: Sequence[NDArray[np.generic]],
        *,
        pages: int,
        max_rows: int = STEP_ROWS,
        threads: int = 1,
    ) -> CpuRank:
        """From a lowered graph whose program is built and whose weights are packed. Raises ArtifactError too."""
        instance = cls.__new__(cls)
        instance._open(rank, graph, library, packed, pages, max_rows, threads)
        return instance

    def _open(
        self,
        rank: int,
        graph: Graph,
        library: Path,
        packed: Sequence[NDArray[np.generic]],
        pages: int,
        max_rows: int,
        threads: int,
    ) -> None:
        self.rank = rank
        self._graph, self._join = split_logits(graph)
        self._types = self._graph.types()
        self._library = CpuLibrary(
            library, packed, threads=threads, max_rows=max_rows, pages=pages, max_positions=pages * PAGE_TOKENS
        )
        self.facts = self._library.facts
        self._times: StepTimes | None = None

    def keep_times(self) -> StepTimes:
        """Record when all steps from now on, and their nodes (of ``split_logits``), begin and end.

        Raises ArtifactError for a program that has no clock.
        """
        self._times = StepTimes.of(self._library, len(self._graph.nodes))
        return self._times

    def step(
        self, batch: StepBatch, meet: Meet, *, want_logits: bool = True, want_features: bool = True
    ) -> StepResult | None:
        """One step; None from ranks before the last stage, the same from all others. All ranks pass the same flags.

        Raises what ``meet`` raises.
        """
        began = time.monotonic_ns()
        result = self._step(batch, meet, want_logits, want_features)
        if self._times is not None:
            self._times.note(began, time.monotonic_ns())
        return result

    def _step(self, batch: StepBatch, meet: Meet, want_logits: bool, want_features: bool) -> StepResult | None:
        share = self.facts.outputs  # columns of the logits; a rank before the last stage has none
        result = StepResult.room_for(
            batch, share, self.facts.feature_columns,
            want_logits=bool(share) and (want_logits or self._join is not None), want_features=want_features,
        )  # fmt: skip

        def on_exchange(index: int, source: Rows | None, target: Rows | None) -> None:
            node = self._graph.nodes[index]
            operand = None if source is None else source[:, : self._columns(node.inputs[0])]
            result = meet(self.rank, node, operand)
            if target is not None:
                target[:, : _columns_of(node.outputs[0])] = result

        arrays = program_arrays(batch)
        if not self.facts.reads_features:
            arrays["features"] = None
        self._library.step(
            arrays, result.argmax_L, result.logits_LV, result.features_TE, on_exchange, first_rows(self._graph)
        )
        if not self.facts.outputs:
            return None
        if self._join is not None:
            assert result.logits_LV is not None
            argmax_L, logits_LV = self._joined(self._join, meet, result.argmax_L, result.logits_LV, want_logits)
            result = StepResult(argmax_L, logits_LV, result.features_TE)
        return result

    def _joined(
        self, join: Node, meet: Meet, argmax_L: NDArray[np.int32], share_LV: Rows, want_logits: bool
    ) -> tuple[NDArray[np.int32], Rows | None]:
        """Argmax over the whole vocabulary, and all logits if wanted; else ranks exchange only their best value."""
        if want_logits:
            logits_LV = meet(self.rank, join, share_LV)
            return best_L(logits_LV), logits_LV
        attrs = dict(join.attrs)
        sizes, part = attrs["sizes"], attrs["part"]
        assert isinstance(sizes, tuple) and isinstance(part, int)
        lost = argmax_L < 0  # nothing finite in this rank's share
        value_L = np.take_along_axis(share_LV, np.maximum(argmax_L, 0)[:, None], 1)[:, 0]
        pairs = np.stack([np.where(lost, -np.inf, value_L), np.where(lost, -1, argmax_L + int(sum(sizes[:part])))], 1)
        together = meet(self.rank, _pair_join(join, len(sizes)), pairs.astype(np.float32))
        # Ranks hold the vocabulary in order, and the first of equal values is taken: the lowest index wins.
        chosen = together[:, ::2].argmax(-1)[:, None]
        return np.take_along_axis(together[:, 1::2], chosen, 1)[:, 0].astype(np.int32), None

    def _columns(self, name: str) -> int:
        return _columns_of(Value(name, self._types[name]))

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        """Copy K/V of this rank's layers and heads, slot by slot, in order."""
        self._library.move_kv(np.ascontiguousarray(src_slots, np.int32), np.ascontiguousarray(dst_slots, np.int32))

    def close(self) -> None:
        self._library.close()


def _pair_join(join: Node, ranks: int) -> Node:
    """The combine of a value and a vocabulary index (exact in float32 below 2^24) of each rank."""
    result = join.outputs[0]
    paired = Value(f"{result.name}.best", replace(result.type, dims=(result.type.dims[0], 2 * ranks)))
    return replace(join.with_attr("sizes", (2,) * ranks), outputs=(paired,))


def _columns_of(value: Value) -> int:
    return prod(dim for dim in value.type.dims[1:] if isinstance(dim, int))

"""Executor over a generated CPU program: checks a step's sizes, hands its arrays over, returns the results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import EngineError
from flexspec.graph import Graph
from flexspec.kernels.cpu.build import build_path, supported_isas
from flexspec.kernels.cpu.launch import CpuLibrary
from flexspec.kernels.cpu.pack import GetWeight, pack
from flexspec.kernels.cpu.render import render
from flexspec.kv_slots import STEP_ROWS
from flexspec.runtime.executors.step import StepBatch, StepResult
from flexspec.runtime.executors.step_rules import check_step, program_arrays
from flexspec.runtime.executors.step_times import StepTimes
from flexspec.types import PAGE_TOKENS


class CpuExecutor:
    """Runs one model on the CPU. ``weights`` are the packed arrays of the program's weight table, in order."""

    def __init__(
        self,
        library: Path,
        weights: Sequence[NDArray[np.generic]],
        *,
        pages: int,
        max_rows: int = STEP_ROWS,
        threads: int = 1,
    ) -> None:
        """Raises ArtifactError when library and weights do not belong together, CapacityError for too little memory."""
        self.max_rows = max_rows
        self.pages = pages
        self.threads = threads
        positions = pages * PAGE_TOKENS  # none is beyond the pool's last slot
        self._library = CpuLibrary(
            library, weights, threads=threads, max_rows=max_rows, pages=pages, max_positions=positions
        )
        self.facts = self._library.facts
        self.vocab_size = self.facts.outputs
        self.max_positions = min(self.facts.max_positions, positions)
        self._times: StepTimes | None = None

    @classmethod
    def from_graph(
        cls, graph: Graph, get: GetWeight, *, pages: int, max_rows: int = STEP_ROWS, threads: int = 1
    ) -> CpuExecutor:
        """Generate, build (cached) and pack a lowered graph in this process, for the best instruction set here.

        ``get(name)`` gives a weight in float32. For tools that need no artifact; serving opens one. Raises CompileError
        or ToolchainError.
        """
        program = render(graph)
        isa = supported_isas()[0]
        library = build_path(program.source, isa)
        packed = [pack(entry, get) for entry in program.weights]
        return cls(library, packed, pages=pages, max_rows=max_rows, threads=threads)

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        """Run one step. Raises EngineError for rows, tokens or positions beyond the program's limits."""
        began = time.monotonic_ns()
        self._check(batch)
        result = StepResult.room_for(
            batch, self.vocab_size, self.facts.feature_columns, want_logits=want_logits, want_features=want_features
        )
        self._library.step(program_arrays(batch), result.argmax_L, result.logits_LV, result.features_TE)
        if self._times is not None:
            self._times.note(began, time.monotonic_ns())
        return result

    def keep_times(self, nodes: int) -> StepTimes:
        """Record when all steps from now on, and the program's ``nodes`` nodes, begin and end.

        Raises ArtifactError for a program that has no clock.
        """
        self._times = StepTimes.of(self._library, nodes)
        return self._times

    def _check(self, batch: StepBatch) -> None:
        check_step(batch, self.max_rows, self.max_positions, self.facts.id_rows)
        width = self.facts.reads_features
        if width and (batch.features_TE is None or batch.features_TE.shape != (len(batch.ids_T), width)):
            raise EngineError(
                "a step without its features", f"[{len(batch.ids_T)}, {width}]", "feed the LLM's features to the SSM"
            )

    def top_successors(self, logits_LV: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return self._library.top_successors(logits_LV, k)

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        self._library.move_kv(np.ascontiguousarray(src_slots, np.int32), np.ascontiguousarray(dst_slots, np.int32))

    def close(self) -> None:
        self._library.close()

"""Executor over a generated CPU program: checks a step's sizes, hands its arrays over, returns the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import EngineError
from flexspec.graph import Graph
from flexspec.kernels.cpu_build import build_path, supported_isas
from flexspec.kernels.cpu_launch import CpuLibrary
from flexspec.kernels.cpu_pack import GetWeight, pack
from flexspec.kernels.cpu_render import CpuProgram, render
from flexspec.runtime.step import StepBatch, StepResult
from flexspec.types import Role


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """What a step returns and reads, and how far its position tables go."""

    vocab_size: int
    max_positions: int
    feature_columns: int = 0  # width of the features the model exports
    reads_features: int = 0  # width of the features it reads


def shape_of(program: CpuProgram, graph: Graph) -> ProgramShape:
    """The shape of a rendered program; positions end where the shortest rotary table does."""
    limits = [node.attr("max_positions") for node in graph.nodes if node.op == "rope"]
    features = [v.type.dims[-1] for v in graph.inputs if v.type.role is Role.ACTIVATION]
    read = features[0] if features else 0
    assert isinstance(read, int)
    end = min((limit for limit in limits if isinstance(limit, int)), default=2**31 - 1)
    return ProgramShape(program.vocab_size, end, program.feature_columns, read)


class CpuExecutor:
    """Runs one model on the CPU. ``weights`` are the packed arrays of the program's weight table, in order."""

    def __init__(
        self,
        library: Path,
        weights: Sequence[NDArray[np.generic]],
        shape: ProgramShape,
        *,
        pages: int,
        max_rows: int = 256,
        threads: int = 1,
    ) -> None:
        self.vocab_size = shape.vocab_size
        self.max_positions = shape.max_positions
        self.max_rows = max_rows
        self.pages = pages
        self.threads = threads
        self.shape = shape
        self._library = CpuLibrary(
            library, weights, threads=threads, max_rows=max_rows, pages=pages, max_positions=shape.max_positions
        )

    @classmethod
    def from_graph(
        cls, graph: Graph, get: GetWeight, *, pages: int, max_rows: int = 256, threads: int = 1
    ) -> CpuExecutor:
        """Generate, build (cached) and pack a lowered graph in this process, for the best instruction set here.

        ``get(name)`` gives a weight in float32. For tools that need no artifact; serving opens one. Raises CompileError
        or ToolchainError.
        """
        program = render(graph)
        isa = supported_isas()[0]
        library = build_path(program.source, isa)
        packed = [pack(entry, get, program.dtype) for entry in program.weights]
        return cls(library, packed, shape_of(program, graph), pages=pages, max_rows=max_rows, threads=threads)

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        """Run one step. Raises EngineError for more rows than max_rows or positions behind the tables."""
        rows, wanted = len(batch.ids_T), len(batch.logit_rows_L)
        if rows > self.max_rows or (rows and int(batch.positions_T.max()) >= self.max_positions):
            raise EngineError(
                f"a step of {rows} rows up to position {int(batch.positions_T.max())}",
                f"at most {self.max_rows} rows below position {self.max_positions}",
                "split the step; the scheduler's limits are wrong",
            )
        argmax = np.full(wanted, -1, np.int32)
        logits = np.empty((wanted, self.vocab_size), np.float32) if want_logits else None
        columns = self.shape.feature_columns if want_features else 0
        features = np.empty((rows, columns), np.float32) if columns else None
        arrays: dict[str, NDArray[np.generic] | None] = {
            "ids": batch.ids_T,
            "positions": batch.positions_T,
            "starts": batch.starts_R1,
            "contexts": batch.contexts_R,
            "page_table": batch.page_table_RB,
            "logit_rows": batch.logit_rows_L,
            "causal": batch.causal_R,
            "ancestors": batch.ancestors_TW,
            "features": batch.features_TE,
        }
        self._library.step(arrays, argmax, logits, features)
        if wanted and int(argmax.min()) < 0:
            raise EngineError(
                "logits that are not finite", "finite logits", "check the weights; bf16 may overflow where f32 does not"
            )
        return StepResult(argmax, logits, features)

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        self._library.move_kv(np.ascontiguousarray(src_slots, np.int32), np.ascontiguousarray(dst_slots, np.int32))

    def close(self) -> None:
        self._library.close()

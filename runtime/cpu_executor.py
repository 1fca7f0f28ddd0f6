"""Executor over a generated CPU program: checks a step's sizes, hands its arrays over, returns the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import EngineError
from flexspec.kernels.cpu_launch import CpuLibrary
from flexspec.runtime.step import StepBatch, StepResult


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """What a step returns and reads, and how far its position tables go."""

    vocab_size: int
    max_positions: int
    feature_columns: int = 0  # width of the features the model exports
    reads_features: int = 0  # width of the features it reads


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

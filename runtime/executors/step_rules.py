"""What every executor checks of a step and of its results, and a step's arrays as CPU programs take them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import EngineError
from flexspec.runtime.executors.step import StepBatch


def check_step(batch: StepBatch, max_rows: int, max_positions: int, id_rows: int) -> None:
    """Kernels trust their input: refuse what could make them read out of bounds. Raises EngineError.

    ``id_rows``: rows of the embedding; ids must be below it.
    """
    rows, top = len(batch.ids_T), int(batch.positions_T.max(initial=-1))
    if not 0 < rows <= max_rows or top >= max_positions:
        raise EngineError(
            f"a step of {rows} rows up to position {top}",
            f"1 to {max_rows} rows below position {max_positions}",
            "split the step; the scheduler's limits are wrong",
        )
    if int(batch.ids_T.min()) < 0 or int(batch.ids_T.max()) >= id_rows:
        raise EngineError(
            f"token ids from {batch.ids_T.min()} to {batch.ids_T.max()}",
            f"ids from 0 to {id_rows - 1}",
            "the drafts come from another model's tokens; use sources made for this LLM",
        )


def best_L(logits_LV: NDArray[np.float32]) -> NDArray[np.int32]:
    """Argmax as the programs compute it: the lowest index wins, -1 for a row where nothing is finite."""
    shown = np.where(np.isnan(logits_LV), -np.inf, logits_LV)
    argmax_L: NDArray[np.int32] = np.where(shown.max(-1) > -np.inf, shown.argmax(-1), -1).astype(np.int32)
    return argmax_L


def program_arrays(batch: StepBatch) -> dict[str, NDArray[np.generic] | None]:
    """The batch's arrays under the names of kernels/cpu/launch.py."""
    return {
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

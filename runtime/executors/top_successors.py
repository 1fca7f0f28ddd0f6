"""The most likely next tokens of each logits row, in numpy: for executors without a generated kernel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def top_successors(logits_LV: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Indices and softmax probabilities [L, k] of each row's k largest logits, descending, ties to the lower index.

    ``k`` is at most V. A row without a finite maximum gets probability 0 throughout (a diverged SSM must not stop the
    server). ``k`` argmax sweeps: for the k that trees use they beat a partial sort by two to one.
    """
    rows = np.arange(len(logits_LV))
    top_L = logits_LV.max(axis=1)
    sound_L = np.isfinite(top_L)
    left_LV = logits_LV - np.where(sound_L, top_L, np.float32(0.0))[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        total_L = np.exp(left_LV).sum(axis=1)
    index_LK = np.empty((len(rows), k), np.int32)
    value_LK = np.empty(index_LK.shape, np.float32)
    for i in range(index_LK.shape[1]):
        best_L = left_LV.argmax(axis=1)
        index_LK[:, i] = best_L
        value_LK[:, i] = left_LV[rows, best_L]
        left_LV[rows, best_L] = -np.inf
    with np.errstate(over="ignore", invalid="ignore"):
        chance_LK = np.exp(value_LK) / total_L[:, None]
    return index_LK, np.where(sound_L[:, None], chance_LK, np.float32(0.0))

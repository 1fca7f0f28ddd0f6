"""bfloat16 tiles, [16 pairs of k][16 n][2]: what AMX's TDPBF16PS reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexspec.kernels.cpu.weight_formats.registry import TILE_K, TILE_N, CpuFormat


def _pairs(stored_NK: NDArray[np.generic]) -> NDArray[np.generic]:
    rows, columns = stored_NK.shape
    pairs = stored_NK.reshape(rows // TILE_N, TILE_N, columns // TILE_K, TILE_K // 2, 2)
    return pairs.transpose(0, 2, 3, 1, 4).reshape(rows // TILE_N, columns // TILE_K, -1)


FORMAT = CpuFormat("bf16", tile_bytes=1024, tiles=_pairs)

"""float32, unchanged."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexspec.types import DType, WeightFormat


def _float32(values: NDArray[np.generic]) -> NDArray[np.float32]:
    return np.ascontiguousarray(values, np.float32)


FORMAT = WeightFormat(
    name="f32",
    doc="float32",
    dtype=DType.F32,
    block_elements=1,
    block_bytes=4,
    exact=(DType.F32,),
    encode=_float32,
    decode=_float32,
)

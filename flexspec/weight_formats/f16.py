"""IEEE float16: three more bits of precision than bfloat16, but no values above 65504."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexspec.types import DType, WeightFormat


def _encode(values: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):  # reported below
        stored = values.astype(np.float16)
    beyond = ~np.isfinite(stored)
    if beyond.any():
        raise OverflowError(str(values[beyond][0]))
    return stored


def _decode(stored: NDArray[np.generic]) -> NDArray[np.float32]:
    return stored.astype(np.float32)


FORMAT = WeightFormat(
    name="f16",
    doc="float16, values up to 65504",
    dtype=DType.F16,
    block_elements=1,
    block_bytes=2,
    exact=(DType.F32, DType.F16),
    encode=_encode,
    decode=_decode,
)

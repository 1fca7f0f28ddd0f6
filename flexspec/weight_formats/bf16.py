"""bfloat16: the upper half of a float32. numpy has no such type, so its bits are stored as uint16."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexspec.types import DType, WeightFormat


def to_bf16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Float32 to bfloat16 bits, round to nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def widen_bf16(bits: NDArray[np.generic]) -> NDArray[np.float32]:
    """Exact float32 values of bfloat16 bit patterns."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


FORMAT = WeightFormat(
    name="bf16",
    doc="bfloat16",
    dtype=DType.BF16,
    block_elements=1,
    block_bytes=2,
    exact=(DType.F32, DType.BF16),
    encode=to_bf16_bits,
    decode=widen_bf16,
)

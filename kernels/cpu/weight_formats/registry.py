"""How CPU programs store each weight format: every other file of this folder, found by its presence.

The C++ half is templates/cpu/weights/NAME.h: ``fs::weights::NAME``, which expands a tile (templates/cpu/expand.h).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import CompileError
from flexspec.types import WeightFormat

TILE_N, TILE_K = 16, 32


@dataclass(frozen=True, slots=True)
class CpuFormat:
    """The tiles of one format, 16 rows of the weight (n) by 32 of its columns (k)."""

    name: str  # of the weight format
    tile_bytes: int
    # Stored rows, N a multiple of 16 and K of 32 -> [N/16, K/32, tile], in the order that the C++ half expands.
    tiles: Callable[[NDArray[np.generic]], NDArray[np.generic]]


@cache
def cpu_formats() -> Mapping[str, CpuFormat]:
    """Every format that CPU programs read, by name: the ``FORMAT`` of each other file here."""
    import flexspec.kernels.cpu.weight_formats as package

    files = [module.name for module in pkgutil.iter_modules(package.__path__) if module.name != "registry"]
    formats = [importlib.import_module(f"{package.__name__}.{file}").FORMAT for file in files]
    return {stored.name: stored for stored in sorted(formats, key=lambda stored: stored.name)}


def cpu_format(stored: WeightFormat) -> CpuFormat:
    """The tiles of a weight format. Raises CompileError where CPU programs have none."""
    if stored.name not in cpu_formats():
        raise CompileError(
            f"weights stored as {stored.name}",
            f"a format that CPU programs read: {', '.join(cpu_formats())}",
            "choose another one (--weights), or add its tiles to kernels/cpu/weight_formats",
        )
    return cpu_formats()[stored.name]


def k_major(stored_NK: NDArray[np.generic]) -> NDArray[np.generic]:
    """Tiles [32 k][16 n] of formats that store one number an element."""
    rows, columns = stored_NK.shape
    blocks = stored_NK.reshape(rows // TILE_N, TILE_N, columns // TILE_K, TILE_K)
    return blocks.transpose(0, 2, 3, 1).reshape(rows // TILE_N, columns // TILE_K, -1)

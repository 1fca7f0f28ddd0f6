"""Packing of weights into the tiles that templates/cpu/tile.h reads, done once at compile time.

A matrix [N, K] becomes [N/16][K/32][tile]: column blocks of 16 rows of the weight, each a run of tiles of 32 k, padded
with zeros. The format decides what a tile holds (kernels/cpu/weight_formats); all instruction sets read the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexspec.arithmetic import ceil_div
from flexspec.kernels.cpu.weight_formats.registry import TILE_K, TILE_N, cpu_format
from flexspec.types import DType, WeightFormat
from flexspec.weight_formats.registry import encode_weight

GetWeight = Callable[[str], NDArray[np.float32]]
RotaryTables = tuple[NDArray[np.float32], NDArray[np.float32]]  # cos and sin
Shapes = Mapping[str, tuple[int, ...]]  # of the model's weights, by name


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One entry of a program's weight table: how it is packed from the model's weights."""

    kind: str  # a key of PACKINGS
    names: tuple[str, ...]
    format: WeightFormat | None = None  # of matrices; everything else is float32
    table: RotaryTables | None = None  # of rotary entries

    @property
    def is_bf16(self) -> bool:
        """The packed numbers are bfloat16 bits: numpy calls them uint16, a file should not."""
        return self.format is not None and self.format.dtype is DType.BF16


class Packing(Protocol):
    """How entries of one kind are packed, and how large the result is."""

    def pack(self, entry: PackedWeight, get: GetWeight) -> NDArray[np.generic]: ...

    def bytes(self, entry: PackedWeight, shapes: Shapes) -> int: ...


def pack(entry: PackedWeight, get: GetWeight) -> NDArray[np.generic]:
    """The bytes of one weight-table entry, C-contiguous.

    Raises whatever ``get`` raises for a missing weight, and WeightError for a value that the format cannot hold.
    """
    return PACKINGS[entry.kind].pack(entry, get)


def packed_bytes(entry: PackedWeight, shapes: Shapes) -> int:
    """Size of the array that :func:`pack` returns for an entry."""
    return PACKINGS[entry.kind].bytes(entry, shapes)


def pack_tiles(stored_NK: NDArray[np.generic], stored: WeightFormat, multiple: int = 2 * TILE_N) -> NDArray[np.generic]:
    """Rows as a format stores them -> [N/16, K/32, tile].

    N is padded to ``multiple`` and K to 32, with bytes of zero.
    """
    rows, units = stored_NK.shape  # a unit is an item of the stored array: a number, or a byte of a block
    tile_blocks = ceil_div(TILE_K, stored.block_elements)
    tile_units = tile_blocks * stored.block_bytes // stored_NK.itemsize
    padded = np.pad(stored_NK, ((0, -rows % multiple), (0, -units % tile_units)))
    return np.ascontiguousarray(cpu_format(stored).tiles(padded))


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Matrices as tiles."""

    arrange: Callable[[Sequence[NDArray[np.generic]], WeightFormat], NDArray[np.generic]]
    padded_rows: Callable[[Sequence[int]], int]  # of the result, from those of the named matrices
    stacked: bool = False  # weights are [X, N, K]: the tiles of each expert, one after the other

    def pack(self, entry: PackedWeight, get: GetWeight) -> NDArray[np.generic]:
        assert entry.format is not None
        weights = [get(name) for name in entry.names]
        experts = zip(*weights, strict=True) if self.stacked else [weights]
        packed = [self._pack(entry, entry.format, matrices) for matrices in experts]
        return packed[0] if len(packed) == 1 else np.concatenate(packed)

    def _pack(
        self, entry: PackedWeight, stored: WeightFormat, matrices: Sequence[NDArray[np.float32]]
    ) -> NDArray[np.generic]:
        parts = [encode_weight(name, stored, values) for name, values in zip(entry.names, matrices, strict=True)]
        return self.arrange(parts, stored)

    def bytes(self, entry: PackedWeight, shapes: Shapes) -> int:
        assert entry.format is not None
        dims = [shapes[name] for name in entry.names]
        experts = dims[0][0] if self.stacked else 1
        blocks = self.padded_rows([shape[-2] for shape in dims]) // TILE_N
        return experts * blocks * (_round_up(dims[0][-1], TILE_K) // TILE_K) * cpu_format(entry.format).tile_bytes


@dataclass(frozen=True, slots=True)
class _Vectors:
    """The named vectors joined, float32, padded to 32."""

    def pack(self, entry: PackedWeight, get: GetWeight) -> NDArray[np.generic]:
        joined = np.concatenate([get(name).reshape(-1) for name in entry.names])
        return np.pad(joined, (0, -len(joined) % 32)).astype(np.float32)

    def bytes(self, entry: PackedWeight, shapes: Shapes) -> int:
        return 4 * _round_up(sum(shapes[name][0] for name in entry.names), 32)


@dataclass(frozen=True, slots=True)
class _RotaryTable:
    """One of the two tables that come with the entry."""

    index: int

    def pack(self, entry: PackedWeight, get: GetWeight) -> NDArray[np.generic]:
        return np.ascontiguousarray(self._table(entry), np.float32)

    def bytes(self, entry: PackedWeight, shapes: Shapes) -> int:
        return 4 * self._table(entry).size

    def _table(self, entry: PackedWeight) -> NDArray[np.float32]:
        assert entry.table is not None
        return entry.table[self.index]


def _stack(parts: Sequence[NDArray[np.generic]], stored: WeightFormat) -> NDArray[np.generic]:
    """One matrix of all rows."""
    return pack_tiles(parts[0] if len(parts) == 1 else np.concatenate(parts), stored)


def _alternate(parts: Sequence[NDArray[np.generic]], stored: WeightFormat) -> NDArray[np.generic]:
    """Blocks of gate and up alternate, so that one panel has both."""
    tiles = [pack_tiles(part, stored, TILE_N) for part in parts]
    return np.ascontiguousarray(np.stack(tiles, axis=1)).reshape(-1, *tiles[0].shape[1:])


def _rows_of_stack(rows: Sequence[int]) -> int:
    return _round_up(sum(rows), 2 * TILE_N)


def _rows_alternating(rows: Sequence[int]) -> int:
    return sum(_round_up(n, TILE_N) for n in rows)


def _round_up(n: int, multiple: int) -> int:
    return ceil_div(n, multiple) * multiple


PACKINGS: Mapping[str, Packing] = {
    "matrix": _Matrices(_stack, _rows_of_stack),
    "swiglu": _Matrices(_alternate, _rows_alternating),
    "experts": _Matrices(_stack, _rows_of_stack, stacked=True),
    "experts_swiglu": _Matrices(_alternate, _rows_alternating, stacked=True),
    "vector": _Vectors(),
    "cos": _RotaryTable(0),
    "sin": _RotaryTable(1),
}

"""Packing of weights into the tile layouts of templates/cpu/tile.h, done once at compile time.

bf16 tiles are [16 pairs of k][16 n][2] (1 KiB), f32 tiles [32 k][16 n] (2 KiB); a matrix [N, K] becomes
[N/16][K/32][tile], padded with zeros. All instruction sets read the same layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexspec.types import DType

TILE_N, TILE_K = 16, 32
GetWeight = Callable[[str], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One entry of a program's weight table: how it is made from the model's weights.

    ``kind``: "matrix" (the named matrices stacked along N), "swiglu" (gate and up, 16-row blocks alternating), "vector"
    (the named vectors joined, float32, padded to 32), "cos"/"sin" (rotary tables, made by ``table``), "experts" and
    "experts_swiglu" (a matrix, or gate and up, of each expert [X, N, K], one behind the other).
    """

    kind: str
    names: tuple[str, ...]
    table: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None


def to_bf16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Float32 to bfloat16 bits, round to nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def from_bf16_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _padded(x_NK: NDArray[np.float32], multiple: int) -> NDArray[np.float32]:
    n, k = x_NK.shape
    return np.pad(x_NK, ((0, -n % multiple), (0, -k % TILE_K)))


def pack_tiles(x_NK: NDArray[np.float32], dtype: DType, multiple: int = 2 * TILE_N) -> NDArray[np.generic]:
    """[N, K] -> [N/16, K/32, tile elements]; N is padded to ``multiple``. dtype BF16 gives uint16 bits, F32 floats."""
    x = _padded(x_NK, multiple)
    nb, kb = x.shape[0] // TILE_N, x.shape[1] // TILE_K
    if dtype is DType.BF16:
        pairs = to_bf16_bits(x).reshape(nb, TILE_N, kb, TILE_K // 2, 2)
        return np.ascontiguousarray(pairs.transpose(0, 2, 3, 1, 4)).reshape(nb, kb, -1)
    return np.ascontiguousarray(x.reshape(nb, TILE_N, kb, TILE_K).transpose(0, 2, 3, 1)).reshape(nb, kb, -1)


def pack(entry: PackedWeight, get: GetWeight, dtype: DType) -> NDArray[np.generic]:
    """The bytes of one weight-table entry. Raises whatever ``get`` raises for a missing weight."""
    if entry.kind in ("cos", "sin"):
        assert entry.table is not None
        return np.ascontiguousarray(entry.table[0 if entry.kind == "cos" else 1], np.float32)
    if entry.kind == "vector":
        joined = np.concatenate([get(name).reshape(-1) for name in entry.names])
        return np.pad(joined, (0, -len(joined) % 32)).astype(np.float32)
    if entry.kind == "swiglu":
        gate, up = (get(name) for name in entry.names)
        return _alternate(gate, up, dtype)
    if entry.kind == "experts_swiglu":
        gates, ups = (get(name) for name in entry.names)
        return np.concatenate([_alternate(gate, up, dtype) for gate, up in zip(gates, ups, strict=True)])
    if entry.kind == "experts":
        return np.concatenate([pack_tiles(expert, dtype) for expert in get(entry.names[0])])
    return pack_tiles(_stack([get(name) for name in entry.names]), dtype)


def _alternate(gate: NDArray[np.float32], up: NDArray[np.float32], dtype: DType) -> NDArray[np.generic]:
    """Blocks of gate and up, turn by turn: both sit in one panel."""
    tiles = [pack_tiles(part, dtype, TILE_N) for part in (gate, up)]
    return np.ascontiguousarray(np.stack(tiles, axis=1)).reshape(-1, *tiles[0].shape[1:])


def packed_bytes(entry: PackedWeight, shapes: Mapping[str, tuple[int, ...]], dtype: DType) -> int:
    """Size of what :func:`pack` makes of an entry, from the shapes of the model's weights."""
    if entry.kind in ("cos", "sin"):
        assert entry.table is not None
        return 4 * entry.table[0].size
    stacked = entry.kind.startswith("experts")
    experts = shapes[entry.names[0]][0] if stacked else 1
    rows = [shapes[name][1 if stacked else 0] for name in entry.names]
    if entry.kind == "vector":
        return 4 * _round_up(sum(rows), 32)
    column_bytes = dtype.size_bytes * _round_up(shapes[entry.names[0]][-1], TILE_K)
    if entry.kind in ("swiglu", "experts_swiglu"):
        return experts * column_bytes * sum(_round_up(n, TILE_N) for n in rows)
    return experts * column_bytes * _round_up(sum(rows), 2 * TILE_N)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _stack(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

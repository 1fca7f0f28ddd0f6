"""Packed weights: every element at its place in the tiles, zeros around, and sizes as the programs have them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from flexspec.kernels.cpu.pack import PackedWeight, from_bf16_bits, pack, pack_tiles, packed_bytes, to_bf16_bits
from flexspec.types import DType


def unpack(tiles: NDArray[np.generic], dtype: DType) -> NDArray[np.float32]:
    """[N/16, K/32, tile] back to [N, K], element by element as templates/cpu/tile.h reads it."""
    blocks, columns = tiles.shape[:2]
    out = np.empty((16 * blocks, 32 * columns), np.float32)
    for n in range(out.shape[0]):
        for k in range(out.shape[1]):
            tile, lane, row = tiles[n // 16, k // 32], n % 16, k % 32
            if dtype is DType.BF16:
                out[n, k] = from_bf16_bits(tile[row // 2 * 32 + lane * 2 + row % 2 :][:1])[0]
            else:
                out[n, k] = tile[row * 16 + lane]
    return out


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 32), (33, 65), (40, 31)])
def test_tiles_hold_every_element_and_zeros_around(dtype: DType, n: int, k: int) -> None:
    x = np.random.default_rng(n).standard_normal((n, k)).astype(np.float32)
    found = unpack(pack_tiles(x, dtype), dtype)
    assert found.shape == (-(-n // 32) * 32, -(-k // 32) * 32)
    expected = from_bf16_bits(to_bf16_bits(x)) if dtype is DType.BF16 else x
    np.testing.assert_array_equal(found[:n, :k], expected)
    assert not found[n:].any() and not found[:, k:].any()


def test_bfloat16_rounds_to_nearest_even() -> None:
    import torch

    rng = np.random.default_rng(0)
    edges = np.array([0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -3.4e38, 1e-40, np.inf, -np.inf], np.float32)
    x = np.concatenate(
        [edges, rng.standard_normal(1000).astype(np.float32), np.float32(2) ** rng.uniform(-130, 127, 500)]
    )
    x = x.astype(np.float32)
    expected = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(from_bf16_bits(to_bf16_bits(x)), expected)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_entries_stack_alternate_and_join(dtype: DType) -> None:
    rng = np.random.default_rng(1)
    shapes = {"q": (24, 33), "k": (8, 33), "gate": (20, 40), "up": (20, 40), "a": (5,), "b": (30,)}
    values = {name: rng.integers(-9, 9, shape).astype(np.float32) for name, shape in shapes.items()}
    tables = (values["q"], values["q"] + 1)
    entries = {
        "matrix": PackedWeight("matrix", ("q", "k")),
        "swiglu": PackedWeight("swiglu", ("gate", "up")),
        "vector": PackedWeight("vector", ("a", "b")),
        "cos": PackedWeight("cos", ("rope",), tables),
        "sin": PackedWeight("sin", ("rope",), tables),
    }
    packed = {kind: pack(entry, values.__getitem__, dtype) for kind, entry in entries.items()}
    for kind, entry in entries.items():
        assert packed[kind].nbytes == packed_bytes(entry, shapes, dtype) and packed[kind].flags.c_contiguous
    np.testing.assert_array_equal(unpack(packed["matrix"], dtype)[:32, :33], np.concatenate([values["q"], values["k"]]))
    both = unpack(packed["swiglu"], dtype)
    gate, up = both.reshape(2, 2, 16, 64).transpose(1, 0, 2, 3).reshape(2, 32, 64)
    np.testing.assert_array_equal(gate[:20, :40], values["gate"])
    np.testing.assert_array_equal(up[:20, :40], values["up"])
    assert packed["vector"].shape == (64,) and not packed["vector"][35:].any()
    np.testing.assert_array_equal(packed["vector"][:35], np.concatenate([values["a"], values["b"]]))
    np.testing.assert_array_equal(packed["sin"], tables[1])


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_experts_lie_one_behind_the_other(dtype: DType) -> None:
    """Each as if it were alone, padding included."""
    rng = np.random.default_rng(2)
    shapes = {"gate": (3, 20, 40), "up": (3, 20, 40), "down": (3, 40, 20)}
    values = {name: rng.integers(-9, 9, shape).astype(np.float32) for name, shape in shapes.items()}
    both, down = PackedWeight("experts_swiglu", ("gate", "up")), PackedWeight("experts", ("down",))
    for entry, alone in ((both, "swiglu"), (down, "matrix")):
        stack = pack(entry, values.__getitem__, dtype)
        assert stack.nbytes == packed_bytes(entry, shapes, dtype) and stack.flags.c_contiguous
        parts = np.split(stack, 3)
        for expert in range(3):
            one = {name: value[expert] for name, value in values.items()}
            np.testing.assert_array_equal(parts[expert], pack(PackedWeight(alone, entry.names), one.__getitem__, dtype))


def test_a_missing_weight_is_the_loaders_error() -> None:
    weights: dict[str, NDArray[np.float32]] = {}
    with pytest.raises(KeyError, match="absent"):
        pack(PackedWeight("vector", ("absent",)), weights.__getitem__, DType.F32)

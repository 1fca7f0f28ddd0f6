"""Packed weights: every element at its place in the tiles, zeros around, and sizes as the programs have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from flexspec.errors import WeightError
from flexspec.kernels.cpu.pack import PackedWeight, pack, pack_tiles, packed_bytes
from flexspec.kernels.cpu.weight_formats.registry import CpuFormat
from flexspec.types import WeightFormat
from flexspec.weight_formats.registry import weight_formats

ELEMENTWISE = [stored for stored in weight_formats().values() if stored.block_elements == 1]
FORMATS = pytest.mark.parametrize("stored", ELEMENTWISE, ids=lambda stored: stored.name)


def unpack(tiles: NDArray[np.generic], stored: WeightFormat) -> NDArray[np.float32]:
    """[N/16, K/32, tile] back to [N, K], element by element as templates/cpu/weights reads it."""
    blocks, columns = tiles.shape[:2]
    out = np.empty((16 * blocks, 32 * columns), np.float32)
    for n in range(out.shape[0]):
        for k in range(out.shape[1]):
            tile, lane, row = tiles[n // 16, k // 32], n % 16, k % 32
            at = row // 2 * 32 + lane * 2 + row % 2 if stored.name == "bf16" else row * 16 + lane
            out[n, k] = stored.decode(tile[at : at + 1])[0]
    return out


@FORMATS
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 32), (33, 65), (40, 31)])
def test_tiles_hold_every_element_and_zeros_around(stored: WeightFormat, n: int, k: int) -> None:
    x = np.random.default_rng(n).standard_normal((n, k)).astype(np.float32)
    found = unpack(pack_tiles(stored.encode(x), stored), stored)
    assert found.shape == (-(-n // 32) * 32, -(-k // 32) * 32)
    np.testing.assert_array_equal(found[:n, :k], stored.decode(stored.encode(x)))
    assert not found[n:].any() and not found[:, k:].any()


@pytest.mark.parametrize(
    ("block_elements", "block_bytes", "row_bytes", "padded_bytes"),
    [(1, 1, 70, 96), (16, 9, 5 * 9, 6 * 9), (32, 18, 3 * 18, 3 * 18), (256, 144, 144, 144)],
)
def test_rows_of_bytes_are_padded_to_whole_tiles(
    monkeypatch: pytest.MonkeyPatch, block_elements: int, block_bytes: int, row_bytes: int, padded_bytes: int
) -> None:
    as_stored = CpuFormat("toy", tile_bytes=0, tiles=lambda stored_NK: stored_NK)
    monkeypatch.setattr("flexspec.kernels.cpu.pack.cpu_format", lambda stored: as_stored)
    toy = replace(
        weight_formats()["f16"], name="toy", dtype=None, block_elements=block_elements, block_bytes=block_bytes
    )
    stored_NK = np.ones((3, row_bytes), np.uint8)
    assert pack_tiles(stored_NK, toy).shape == (32, padded_bytes)


@FORMATS
def test_entries_stack_alternate_and_join(stored: WeightFormat) -> None:
    rng = np.random.default_rng(1)
    shapes = {"q": (24, 33), "k": (8, 33), "gate": (20, 40), "up": (20, 40), "a": (5,), "b": (30,)}
    random = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    values = {name: stored.decode(stored.encode(x)) for name, x in random.items()}  # which the format holds
    tables = (values["q"], values["q"] + 1)
    entries = {
        "matrix": PackedWeight("matrix", ("q", "k"), stored),
        "swiglu": PackedWeight("swiglu", ("gate", "up"), stored),
        "vector": PackedWeight("vector", ("a", "b")),
        "cos": PackedWeight("cos", ("rope",), table=tables),
        "sin": PackedWeight("sin", ("rope",), table=tables),
    }
    packed = {kind: pack(entry, values.__getitem__) for kind, entry in entries.items()}
    for kind, entry in entries.items():
        assert packed[kind].nbytes == packed_bytes(entry, shapes) and packed[kind].flags.c_contiguous
    np.testing.assert_array_equal(
        unpack(packed["matrix"], stored)[:32, :33], np.concatenate([values["q"], values["k"]])
    )
    both = unpack(packed["swiglu"], stored)
    gate, up = both.reshape(2, 2, 16, 64).transpose(1, 0, 2, 3).reshape(2, 32, 64)
    np.testing.assert_array_equal(gate[:20, :40], values["gate"])
    np.testing.assert_array_equal(up[:20, :40], values["up"])
    assert packed["vector"].shape == (64,) and not packed["vector"][35:].any()
    np.testing.assert_array_equal(packed["vector"][:35], np.concatenate([values["a"], values["b"]]))
    np.testing.assert_array_equal(packed["sin"], tables[1])


@FORMATS
def test_experts_lie_one_behind_the_other(stored: WeightFormat) -> None:
    """Each as if it were alone, padding included."""
    rng = np.random.default_rng(2)
    shapes = {"gate": (3, 20, 40), "up": (3, 20, 40), "down": (3, 40, 20)}
    values = {name: rng.integers(-9, 9, shape).astype(np.float32) for name, shape in shapes.items()}
    both, down = PackedWeight("experts_swiglu", ("gate", "up"), stored), PackedWeight("experts", ("down",), stored)
    for entry, alone in ((both, "swiglu"), (down, "matrix")):
        stack = pack(entry, values.__getitem__)
        assert stack.nbytes == packed_bytes(entry, shapes) and stack.flags.c_contiguous
        parts = np.split(stack, 3)
        for expert in range(3):
            one = {name: value[expert] for name, value in values.items()}
            expected = pack(PackedWeight(alone, entry.names, stored), one.__getitem__)
            np.testing.assert_array_equal(parts[expert], expected)


def test_a_missing_weight_is_the_loaders_error() -> None:
    weights: dict[str, NDArray[np.float32]] = {}
    with pytest.raises(KeyError, match="absent"):
        pack(PackedWeight("vector", ("absent",)), weights.__getitem__)


def test_a_value_out_of_range_names_its_weight() -> None:
    weights = {"w": np.full((2, 2), 7e4, np.float32)}
    with pytest.raises(WeightError, match="weight w has 70000.0, out of range for f16"):
        pack(PackedWeight("matrix", ("w",), weight_formats()["f16"]), weights.__getitem__)

"""Safetensors writer and mapper: alignment, round trip, agreement with the safetensors library, damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file

from flexspec.compiler.artifact.tensor_file import ALIGNMENT, encode_tensors, map_tensors
from flexspec.errors import ArtifactError

DTYPES = ["|u1", "|i1", "<u2", "<f2", "<i4", "<f4", "<u8", "<i8", "<f8"]


def write(path: Path, tensors: dict[str, Any], **options: Any) -> Path:
    path.write_bytes(b"".join(encode_tensors(tensors, **options)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensors")


arrays = hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))


@given(st.dictionaries(st.text(max_size=8).filter(lambda name: name != "__metadata__"), arrays, max_size=5))
def test_round_trip_and_alignment(folder: Path, tensors: dict[str, Any]) -> None:
    path = write(folder / "x.safetensors", tensors)
    loaded = map_tensors(path, fix="")
    assert loaded.keys() == tensors.keys()
    for name, array in tensors.items():
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        assert loaded[name].tobytes() == array.tobytes()
        address = loaded[name].ctypes.data
        assert array.size == 0 or address % array.itemsize == 0
        assert array.size == 0 or array.nbytes % ALIGNMENT or address % ALIGNMENT == 0


def test_other_readers_agree(folder: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {"b": rng.integers(0, 255, 64, np.uint8), "a": rng.standard_normal((3, 5)).astype(np.float32)}
    path = write(folder / "lib.safetensors", tensors)
    theirs = load_file(path)
    for name, array in tensors.items():
        np.testing.assert_array_equal(theirs[name], array)


def test_bf16_is_named_in_the_header_and_read_as_bits(folder: Path) -> None:
    bits = np.array([0x3F80, 0xC000], np.uint16)
    path = write(folder / "bf16.safetensors", {"w": bits}, bf16={"w"})
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["w"]["dtype"] == "BF16"
    np.testing.assert_array_equal(map_tensors(path, fix="")["w"], bits)


def test_views_are_read_only_and_outlive_the_file(folder: Path) -> None:
    path = write(folder / "gone.safetensors", {"w": np.arange(1000)})
    tensor = map_tensors(path, fix="")["w"]
    path.unlink()
    assert int(tensor.sum()) == 499500
    with pytest.raises(ValueError, match="read-only"):
        tensor[0] = 1


def test_order_of_the_mapping_does_not_matter() -> None:
    a, b = np.zeros(16, np.float32), np.ones(3, np.uint8)
    assert b"".join(encode_tensors({"a": a, "b": b})) == b"".join(encode_tensors({"b": b, "a": a}))


def test_dtypes_without_a_name_are_refused() -> None:
    with pytest.raises(ValueError, match="complex128"):
        b"".join(encode_tensors({"z": np.zeros(1, np.complex128)}))
    with pytest.raises(ValueError, match="uint16"):
        b"".join(encode_tensors({"z": np.zeros(1, np.float32)}, bf16={"z"}))


def entry(begin: int, end: int, shape: list[int]) -> dict[str, Any]:
    return {"dtype": "U8", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (json.dumps({"a": entry(0, 8, [7])}).encode(), "is invalid"),
        (json.dumps({"a": {"dtype": "U8"}}).encode(), "is invalid"),
        (json.dumps({"a": entry(0, 8, [8]) | {"dtype": "F5"}}).encode(), "is invalid"),
        (json.dumps({"a": entry(0, 8, [8]) | {"shape": [-8]}}).encode(), "is invalid"),
        (json.dumps({"a": entry(4, 8, [4])}).encode(), "starts at byte 4"),
        (json.dumps({"a": entry(0, 8, [8]), "b": entry(4, 8, [4])}).encode(), "starts at byte 4"),
        (json.dumps({"a": entry(0, 4, [4])}).encode(), "need 4 bytes"),
        (json.dumps({"a": entry(0, 99, [99])}).encode(), "need 99 bytes"),
    ],
)
def test_damaged_headers_are_one_clear_error(folder: Path, header: bytes, says: str) -> None:
    path = folder / "bad.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ArtifactError, match=says) as caught:
        map_tensors(path, fix="do this")
    assert caught.value.fix == "do this"
    assert "bad.safetensors" in str(caught.value)


def test_headers_larger_than_the_file_are_refused_before_reading(folder: Path) -> None:
    path = folder / "huge.safetensors"
    for data in (b"", b"\x01", (1 << 62).to_bytes(8, "little") + b"{}"):
        path.write_bytes(data)
        with pytest.raises(ArtifactError, match="header"):
            map_tensors(path, fix="")

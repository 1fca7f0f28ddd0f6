"""Safetensors files with numpy only: written with aligned data, read as zero-copy views of the mapped file.

Owns the byte format. The header is padded with spaces so that the data section starts at a multiple of ALIGNMENT;
tensors whose size is a multiple of ALIGNMENT come first, the rest follow by decreasing item size. Mapped tensors of the
first kind are therefore aligned to ALIGNMENT, all others to their item size. Any safetensors reader can read the file.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import ArtifactError

ALIGNMENT = 64  # a cache line, and the widest vector or AMX row that kernels load
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format

_NUMPY_OF_NAME = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "BF16": "<u2",  # numpy has no bfloat16: these are its raw bits
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}
_NAME_OF_NUMPY = {code: name for name, code in _NUMPY_OF_NAME.items() if name != "BF16"}

AnyArray = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Span:
    """A tensor's entry in the header: its type, and its bytes in the data section."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


def encode_tensors(tensors: Mapping[str, AnyArray], *, bf16: Collection[str] = ()) -> Iterator[bytes | memoryview]:
    """Yield the file's bytes: the padded header, then each tensor's data.

    ``bf16`` names the uint16 arrays that hold bfloat16 bits. Raises ValueError for a dtype not in the format.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    order = sorted(arrays, key=lambda n: (arrays[n].nbytes % ALIGNMENT != 0, -arrays[n].itemsize, n))
    header: dict[str, object] = {}
    offset = 0
    for name in order:
        array = arrays[name]
        end = offset + array.nbytes
        dtype = _dtype_name(name, array, name in bf16)
        header[name] = {"data_offsets": [offset, end], "dtype": dtype, "shape": list(array.shape)}
        offset = end
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield arrays[name].reshape(-1).view(np.uint8).data


def _dtype_name(name: str, array: AnyArray, is_bf16: bool) -> str:
    code = array.dtype.str
    if is_bf16:
        if code != "<u2":
            raise ValueError(f"tensor {name}: bfloat16 bits must be uint16, not {array.dtype}")
        return "BF16"
    if code not in _NAME_OF_NUMPY:
        raise ValueError(f"tensor {name}: safetensors has no dtype {array.dtype}")
    return _NAME_OF_NUMPY[code]


def map_tensors(path: Path, *, fix: str) -> dict[str, AnyArray]:
    """All tensors of ``path`` as read-only views of the mapped file; nothing is copied.

    The mapping lives as long as any view does. bfloat16 is returned as uint16. Raises ArtifactError (with ``fix``) if
    the file is malformed.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        data_start, spans = _read_header(file, size, path, fix)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {span.name: _view(mapped, data_start, span) for span in spans}


def _view(mapped: mmap.mmap, data_start: int, span: _Span) -> AnyArray:
    count = math.prod(span.shape)
    if count == 0:
        return np.empty(span.shape, span.dtype)
    flat: AnyArray = np.frombuffer(mapped, span.dtype, count, data_start + span.begin)
    return flat.reshape(span.shape)


def _read_header(file: BinaryIO, size: int, path: Path, fix: str) -> tuple[int, list[_Span]]:
    def damaged(what: str) -> ArtifactError:
        return ArtifactError(f"{path.name}: {what}", "a well-formed safetensors file", fix)

    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise damaged(f"a header of {length} bytes does not fit a file of {size} bytes")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise damaged(f"the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise damaged("the header is not a JSON object")
    spans = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        span = _parse_span(name, entry)
        if span is None:
            raise damaged(f"the header's entry for {name!r} is invalid")
        spans.append(span)
    spans.sort(key=lambda span: (span.begin, span.end))
    edge = 0
    for span in spans:
        if span.begin != edge:
            raise damaged(f"tensor {span.name!r} starts at byte {span.begin}, the one before ends at {edge}")
        edge = span.end
    if edge != size - 8 - length:
        raise damaged(f"the tensors need {edge} bytes, the data section has {size - 8 - length}")
    return 8 + length, spans


def _parse_span(name: str, entry: object) -> _Span | None:
    """A checked header entry; None if it is malformed or its byte range does not match its shape."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return None
    code = _NUMPY_OF_NAME.get(entry["dtype"])
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if code is None or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        return None
    dtype = np.dtype(code)
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize or len(shape) > 32:
        return None
    return _Span(name, dtype, tuple(shape), offsets[0], offsets[1])


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)

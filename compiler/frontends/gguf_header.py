"""Bounded parser of a GGUF file's header: metadata and tensor table, every count checked before memory is allocated.

The file format is specified at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Owns the header only: what
the metadata means is in gguf.py, the tokenizer's part in tokenizer_gguf.py. Nothing read here is trusted: counts,
string lengths, array sizes, tensor dims, offsets and overlaps are checked against the file's size.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from flexspec.arithmetic import ceil_div
from flexspec.compiler.frontends.files import check_file
from flexspec.errors import ModelFileError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_STRING_BYTES = 1 << 24
_MAX_ARRAY = 1 << 22
_MAX_STRINGS = 1 << 22  # of all string arrays together: Python strings take several times their bytes in the file
_MAX_METADATA = 1 << 16
_MAX_TENSORS = 1 << 20
_MIN_TENSOR_ENTRY_BYTES = 8 + 4 + 8 + 4 + 8
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8"}
_SCALARS[12] = "<f8"
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]  # row major
    type: GGMLQuantizationType
    offset: int  # from the start of the file
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (Python scalars, strings, lists of strings, numpy arrays) and the tensor table of one file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Parse and check the header of ``path``. Raises ModelFileError unless it is a complete GGUF file."""
    size = check_file(path, "a GGUF file")
    try:
        with path.open("rb") as file:
            return _Parser(path, file, size).parse()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error})", "a readable file", "check its permissions") from None


class _Parser:
    """A cursor over the header that knows how many bytes remain."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.file = file
        self.size = size
        self.position = 0
        self.strings_left = _MAX_STRINGS

    def parse(self) -> GgufHeader:
        if self.take(4, "the magic number") != MAGIC:
            self.fail("does not begin with GGUF", "a GGUF file")
        version = self.number("<I", "the version")
        if version not in _VERSIONS:
            big_endian = version & 0xFFFF == 0
            found = "is a big-endian GGUF file" if big_endian else f"has GGUF version {version}"
            self.fail(found, "a little-endian GGUF file of version 2 or 3", "convert the model again")
        tensor_count = self.number("<Q", "the tensor count")
        metadata_count = self.number("<Q", "the metadata count")
        if metadata_count > _MAX_METADATA:
            self.fail(f"claims {metadata_count} metadata entries", f"at most {_MAX_METADATA}")
        if tensor_count > min(_MAX_TENSORS, self.left // _MIN_TENSOR_ENTRY_BYTES):
            self.fail(f"claims {tensor_count} tensors", "a count that fits the file")
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self.string("a metadata key")
            if key in metadata:
                self.fail(f"has the metadata key {key!r} twice", "each key once")
            metadata[key] = self.value(self.number("<I", f"the type of {key!r}"), key)
        entries = [self.tensor_entry() for _ in range(tensor_count)]
        return GgufHeader(self.path, metadata, self.place(entries, self.alignment(metadata)))

    @property
    def left(self) -> int:
        return self.size - self.position

    def take(self, count: int, what: str) -> bytes:
        data = self.file.read(count) if count <= self.left else b""
        if len(data) != count:
            self.fail(
                f"ends within {what} (at byte {self.position})",
                "the whole file",
                "the file was truncated or damaged: download it again",
            )
        self.position += count
        return data

    def number(self, form: str, what: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form), what))[0])

    def string(self, what: str) -> str:
        length = self.number("<Q", what)
        if length > min(_MAX_STRING_BYTES, self.left):
            self.fail(f"claims {length} bytes for {what}", "a length that fits the file")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"has {what} that is not UTF-8 (at byte {self.position - length})", "UTF-8 text")

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            self.fail(f"has the unknown value type {kind} for {key!r}", "a type of the GGUF specification")
        dtype = np.dtype(_SCALARS[kind])
        number = np.frombuffer(self.take(dtype.itemsize, f"the value of {key!r}"), dtype)[0]
        # the shortest decimal recovers the intended number: 1e-05, not 9.999999747378752e-06
        return float(str(number)) if kind == _FLOAT32 else number.item()

    def array(self, key: str) -> Any:
        kind = self.number("<I", f"the element type of {key!r}")
        count = self.number("<Q", f"the length of {key!r}")
        if kind == _STRING:
            item_bytes = 8
        elif kind in _SCALARS:
            item_bytes = np.dtype(_SCALARS[kind]).itemsize
        else:
            self.fail(f"has arrays of type {kind} in {key!r}", "an array of scalars or strings")
        if count > min(_MAX_ARRAY, self.left // item_bytes):
            self.fail(f"claims {count} elements for {key!r}", "a length that fits the file")
        what = f"the value of {key!r}"
        if kind == _STRING:
            self.strings_left -= count
            if self.strings_left < 0:
                self.fail(f"holds more than {_MAX_STRINGS} strings", "a vocabulary of usual size")
            return [self.string(what) for _ in range(count)]
        return np.frombuffer(self.take(count * item_bytes, what), np.dtype(_SCALARS[kind]))

    def tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self.string("a tensor name")
        rank = self.number("<I", f"the rank of {name!r}")
        if not 1 <= rank <= _MAX_DIMS:
            self.fail(f"has tensor {name!r} of rank {rank}", f"a rank from 1 to {_MAX_DIMS}")
        dims = [self.number("<Q", f"the dims of {name!r}") for _ in range(rank)]
        type_id = self.number("<I", f"the type of {name!r}")
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            self.fail(f"has tensor {name!r} of the unknown type {type_id}", "a type that the gguf package knows")
        return name, tuple(reversed(dims)), kind, self.number("<Q", f"the offset of {name!r}")

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", 32)
        if type(value) is not int or not 1 <= value <= 1 << 20 or value & (value - 1):
            self.fail(f"has general.alignment {value!r}", "a power of two")
        return value

    def place(
        self, entries: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], alignment: int
    ) -> dict[str, GgufTensor]:
        """Sizes and absolute offsets, checked against the file's size and each other."""
        data_start = ceil_div(self.position, alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, relative in entries:
            if name in tensors:
                self.fail(f"has tensor {name!r} twice", "each tensor once")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if 0 in shape or shape[-1] % block:
                self.fail(f"has tensor {name!r} of shape {list(shape)}", f"rows of whole {kind.name} blocks of {block}")
            size_bytes = math.prod(shape) // block * block_bytes
            if relative % alignment or data_start + relative + size_bytes > self.size:
                found = f"has tensor {name!r} at bytes {relative} to {relative + size_bytes} of its data"
                self.fail(
                    found,
                    f"aligned data within {max(0, self.size - data_start)} bytes",
                    "the file was truncated: download it again",
                )
            tensors[name] = GgufTensor(name, shape, kind, data_start + relative, size_bytes)
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self.fail(f"has overlapping tensors {before!r} and {tensor.name!r}", "tensors that do not overlap")
            end, before = tensor.offset + tensor.size_bytes, tensor.name
        return tensors

    def fail(self, found: str, expected: str, fix: str = "the file is damaged: download it again") -> NoReturn:
        raise ModelFileError(f"{self.path} {found}", expected, fix)

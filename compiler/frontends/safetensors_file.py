"""safetensors checkpoints, single or sharded: a checked header, and tensors read one at a time, widened to float32.

The format is specified at https://github.com/huggingface/safetensors#format. The header is parsed here because numpy
has no bfloat16, and because every offset is checked against the file's size before a byte is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.frontends.files import check_file, parse_json, read_bytes, read_json_object
from flexspec.compiler.frontends.weights import finite
from flexspec.errors import ModelFileError, WeightError
from flexspec.weight_formats.bf16 import widen_bf16

_WHAT = "a safetensors file"
_FIX = "the file was truncated or damaged: download it again"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_RANK = 8
_FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
_INTEGERS = {
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U8": "<u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
}
_BIT_WIDTHS = {"BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    size_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensor table of one file. Raises ModelFileError unless the header is valid and the data complete."""
    size = check_file(path, _WHAT)
    if size < 8:
        raise ModelFileError(f"{path} has {size} bytes", _WHAT, _FIX)
    length = int(read_bytes(path, 0, 8).view("<u8")[0])
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise ModelFileError(f"{path} claims a header of {length} bytes but has {size} bytes", _WHAT, _FIX)
    table = parse_json(bytes(read_bytes(path, 8, length)), path, _WHAT)
    if not isinstance(table, dict):
        raise ModelFileError(f"{path} has a header that is not a JSON object", _WHAT, _FIX)
    data_start, data_bytes = 8 + length, size - 8 - length
    tensors = {
        name: _entry(path, name, entry, data_start, data_bytes)
        for name, entry in table.items()
        if name != "__metadata__"
    }
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.size_bytes)):
        if tensor.offset != end:
            found = f"{path} has a gap or an overlap before tensor {tensor.name!r}"
            raise ModelFileError(found, "contiguous tensors, as the format requires", _FIX)
        end += tensor.size_bytes
    if end != size:
        raise ModelFileError(f"{path} has {size - end} bytes after its last tensor", f"{end} bytes", _FIX)
    return tensors


def _entry(path: Path, name: str, entry: object, data_start: int, data_bytes: int) -> StoredTensor:
    bad = ModelFileError(f"{path} has a damaged entry for tensor {name!r:.120}", "dtype, shape and data_offsets", _FIX)
    if not isinstance(entry, dict):
        raise bad
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _is_counts(shape) or not _is_counts(span) or len(span) != 2:
        raise bad
    if len(shape) > _MAX_RANK or not span[0] <= span[1] <= data_bytes:
        raise bad
    bits = math.prod(shape) * _bit_width(dtype, path, name)
    if bits % 8 or bits // 8 != span[1] - span[0]:
        raise bad
    return StoredTensor(path, name, dtype, tuple(shape), data_start + span[0], span[1] - span[0])


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _bit_width(dtype: str, path: Path, name: str) -> int:
    form = _FLOATS.get(dtype) or _INTEGERS.get(dtype)
    if form is not None:
        return np.dtype(form).itemsize * 8
    if dtype not in _BIT_WIDTHS:
        raise ModelFileError(f"{path} has tensor {name!r:.120} of the unknown dtype {dtype!r:.40}", _WHAT, _FIX)
    return _BIT_WIDTHS[dtype]


class SafetensorsWeights:
    """WeightSource over one or more files; a leading ``model.`` is removed from the names."""

    def __init__(self, tensors: Iterable[StoredTensor], path: Path) -> None:
        self._path = path
        self._tensors: dict[str, StoredTensor] = {}
        for tensor in tensors:
            name = tensor.name.removeprefix("model.")
            if name in self._tensors:
                raise WeightError(f"{path} holds {name!r} twice", "each parameter once", "remove the duplicate")
            self._tensors[name] = tensor

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def get(self, name: str) -> NDArray[np.float32]:
        """The tensor in float32 (bfloat16 and float16 exactly). Raises WeightError for other dtypes."""
        tensor = self._tensor(name)
        form = _FLOATS.get(tensor.dtype)
        if form is None:
            found = f"tensor {tensor.name!r} of {tensor.path} is of dtype {tensor.dtype}"
            raise WeightError(found, f"one of {', '.join(_FLOATS)}", "use the model in bfloat16, not quantised")
        raw = read_bytes(tensor.path, tensor.offset, tensor.size_bytes).view(form)
        with np.errstate(all="ignore"):  # a double may overflow; ``finite`` reports it
            values = widen_bf16(raw) if tensor.dtype == "BF16" else raw.astype(np.float32, copy=False)
        return finite(values, name, tensor.path).reshape(tensor.shape)

    def integers(self, name: str) -> NDArray[np.int64]:
        """A tensor of integers (an id map). Raises WeightError for other dtypes."""
        tensor = self._tensor(name)
        form = _INTEGERS.get(tensor.dtype)
        if form is None:
            found = f"tensor {tensor.name!r} of {tensor.path} is of dtype {tensor.dtype}"
            raise WeightError(found, f"one of {', '.join(_INTEGERS)}", "make the file again")
        raw = read_bytes(tensor.path, tensor.offset, tensor.size_bytes).view(form)
        return raw.astype(np.int64).reshape(tensor.shape)

    def without(self, name: str) -> SafetensorsWeights:
        return SafetensorsWeights((t for key, t in self._tensors.items() if key != name), self._path)

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise WeightError(f"{self._path} has no tensor {name!r}", "every parameter of the model", "check the file")
        return self._tensors[name]


def find_weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder. Raises ModelFileError if there are none, or only pickles."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        return [folder / name for name in sorted(set(read_index(index).values()))]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        fix = "convert it with `transformers` (save_pretrained writes safetensors)"
        raise ModelFileError(f"{folder} has only pickled weights ({pickles[0]})", "model.safetensors", fix)
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    found = f"{folder} has no model.safetensors" + (f" (but {others[0]})" if others else "")
    raise ModelFileError(found, "model.safetensors or model.safetensors.index.json", "download the weights")


def read_index(path: Path) -> Mapping[str, str]:
    """The weight map (tensor name -> file name) of a sharded checkpoint. Raises ModelFileError."""
    table = read_json_object(path, "a safetensors index").get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelFileError(f"{path} has no weight_map", "a safetensors index", "download the file again")
    for name, file in table.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors") or "\0" in file:
            found = f"{path} places {name!r:.120} in {file!r:.120}"
            raise ModelFileError(found, "the name of a safetensors file in the same folder", "download the index again")
    return table


def open_weights(folder: Path) -> SafetensorsWeights:
    """All tensors of a Hugging Face folder. With shards, the index and the files must agree tensor by tensor."""
    files = find_weight_files(folder)
    tensors = [tensor for file in files for tensor in read_header(file).values()]
    if files[0].name != "model.safetensors":
        index = folder / "model.safetensors.index.json"
        listed, stored = set(read_index(index).items()), {(tensor.name, tensor.path.name) for tensor in tensors}
        for missing in sorted(listed - stored):
            found = f"{folder / missing[1]} lacks tensor {missing[0]!r:.120} that {index.name} places there"
            raise WeightError(found, "index and shards of one model", "download the model again")
        for extra in sorted(stored - listed):
            found = f"{folder / extra[1]} has tensor {extra[0]!r:.120} that {index.name} does not list"
            raise WeightError(found, "index and shards of one model", "download the model again")
    return SafetensorsWeights(tensors, folder)

"""Careful file access for the model loaders: checked paths, bounded reads, JSON, and content hashes.

Owns no format. Model files are read, never memory-mapped, so that a file truncated while in use gives an error instead
of a signal. Every failure is a ModelFileError that names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexspec.checked_table import unique_keys
from flexspec.errors import ModelFileError

LFS_MAGIC = b"version https://git-lfs"
MAX_JSON_BYTES = 256 * 1024 * 1024
_CHUNK_BYTES = 1 << 20


def check_file(path: Path, what: str) -> int:
    """Size in bytes of ``path``. Raises ModelFileError unless it is a regular, non-empty file, no Git LFS pointer."""
    try:
        info = path.stat()
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist", what, "check the path, or download the model again") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read ({error})", what, "check the path and its permissions") from None
    if stat.S_ISDIR(info.st_mode):
        raise ModelFileError(f"{path} is a directory", what, "pass the file itself")
    if not stat.S_ISREG(info.st_mode):
        raise ModelFileError(f"{path} is not a regular file", what, "pass an ordinary file")
    if info.st_size == 0:
        raise ModelFileError(f"{path} is empty", what, "download the file again")
    if info.st_size < 1024 and bytes(read_bytes(path, 0, min(info.st_size, len(LFS_MAGIC)))) == LFS_MAGIC:
        raise ModelFileError(f"{path} is a Git LFS pointer", what, "run `git lfs pull` in the model's folder")
    return info.st_size


def read_bytes(path: Path, offset: int, count: int) -> NDArray[np.uint8]:
    """Exactly ``count`` bytes of ``path`` from ``offset``. Raises ModelFileError if the file is shorter."""
    try:
        with path.open("rb", buffering=0) as file:
            if offset + count > os.fstat(file.fileno()).st_size:  # before allocating memory for them
                raise _cut(path, offset, count)
            out = np.empty(count, np.uint8)
            view = memoryview(out.data)
            file.seek(offset)
            while view:
                got = file.readinto(view)
                if not got:
                    raise _cut(path, offset, count)
                view = view[got:]
            return out
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error})", "a readable file", "check its permissions") from None


def _cut(path: Path, offset: int, count: int) -> ModelFileError:
    found = f"{path} ends before byte {offset + count}"
    return ModelFileError(found, "the whole file", "the file was truncated: download it again")


def read_json(path: Path, what: str) -> Any:
    """The JSON value in ``path``. Raises ModelFileError if it is too large, not UTF-8, or not JSON."""
    size = check_file(path, what)
    if size > MAX_JSON_BYTES:
        raise ModelFileError(f"{path} has {size} bytes", f"{what} of at most {MAX_JSON_BYTES} bytes", "check the file")
    return parse_json(bytes(read_bytes(path, 0, size)), path, what)


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """As read_json, for a file that must hold a JSON object."""
    value = read_json(path, what)
    if not isinstance(value, dict):
        found = f"{path} holds a JSON {type(value).__name__}"
        raise ModelFileError(found, f"{what}, a JSON object", "download the file again")
    return value


def parse_json(data: bytes, path: Path, what: str) -> Any:
    """Parse ``data`` strictly: UTF-8, no duplicate keys, no deep nesting. Raises ModelFileError naming ``path``."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        reason = str(error)[:200] if isinstance(error, ValueError) else "nested too deeply"
        raise ModelFileError(f"{path} is not valid JSON ({reason})", what, "download the file again") from None


def read_text(path: Path, what: str) -> str:
    """The UTF-8 text in ``path``. Raises ModelFileError."""
    size = check_file(path, what)
    if size > MAX_JSON_BYTES:
        raise ModelFileError(f"{path} has {size} bytes", f"{what} of at most {MAX_JSON_BYTES} bytes", "check the file")
    try:
        return bytes(read_bytes(path, 0, size)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path} is not UTF-8 text ({error.reason})", what, "download the file again") from None


def hash_files(paths: Iterable[Path]) -> str:
    """sha256 over the contents of ``paths``: of one file its plain sha256; several are hashed with names and sizes."""
    files = sorted(paths, key=lambda path: path.name)
    total = hashlib.sha256()
    for path in files:
        if len(files) > 1:
            total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        try:
            with path.open("rb", buffering=0) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    total.update(chunk)
        except OSError as error:
            found = f"{path} cannot be read ({error})"
            raise ModelFileError(found, "a readable file", "check its permissions") from None
    return total.hexdigest()

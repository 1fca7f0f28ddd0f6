"""The one place that says where flexspec caches what it can rebuild: kernels, unpacked artifacts.

A cache that cannot be used only costs time: what would be in it is made again in a temporary folder.
"""

from __future__ import annotations

import logging
import os
import tempfile
from functools import lru_cache
from pathlib import Path

from flexspec.errors import StorageError
from flexspec.host.files import stored

FIX = "set FLEXSPEC_CACHE to a folder that can be written"
_log = logging.getLogger("flexspec")
_temporary: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def cache_root() -> Path:
    """$FLEXSPEC_CACHE, else flexspec's folder in $XDG_CACHE_HOME, else ~/.cache/flexspec. It need not exist yet.

    Raises StorageError if none of them is set and the user has no home.
    """
    chosen = os.environ.get("FLEXSPEC_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "flexspec"
    except RuntimeError:  # neither HOME nor an entry in the user table
        raise StorageError("no folder for the cache: this user has no home", "HOME or FLEXSPEC_CACHE", FIX) from None


def in_cache(room: str, name: str) -> Path | None:
    """The entry ``name`` of the cache's folder ``room``, if it is there."""
    try:
        path = cache_root() / room / name
        return path if path.exists() else None
    except (StorageError, OSError):
        return None


def writable_cache(room: str) -> Path:
    """The cache's folder ``room``. Where it cannot be written, a warning, once, and a temporary one."""
    try:
        return check_cache(room)
    except StorageError as error:
        return _instead(str(error)) / room


def check_cache(room: str = "") -> Path:
    """The cache's folder ``room``, made and found to be writable. Raises StorageError."""
    folder = cache_root() / room
    with stored(folder, fix=FIX):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"1")
            probe.flush()
    return folder


def temporary_cache(room: str, reason: StorageError) -> Path:
    """A folder to use once the cache refused something (it is full); it lasts as long as this process."""
    return _instead(str(reason)) / room


@lru_cache(maxsize=1)
def _temporary_root() -> Path:
    _temporary.append(tempfile.TemporaryDirectory(prefix="flexspec-cache-"))
    return Path(_temporary[0].name)


@lru_cache(maxsize=8)
def _instead(reason: str) -> Path:
    try:
        root = _temporary_root()
    except OSError as error:
        raise StorageError(
            f"no cache ({reason}) and no temporary folder ({error.strerror})", "one of the two", f"{FIX}, or TMPDIR"
        ) from error
    _log.warning("flexspec: the cache is not used: %s", reason)
    return root

"""How files get to disk: written under a random name beside their place, synced, then renamed.

A reader sees the old file, none, or the whole new one, and what fails or is killed never takes the place of anything.
Folders that are being written are locked: the lock, not a process id (containers repeat those), tells a living writer
from one that was killed. What the system refuses becomes a StorageError with the path and the fix.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from flexspec.errors import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_PLACE = (errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


def storage_error(error: OSError, path: Path, *, needed_bytes: int | None = None, fix: str = "") -> StorageError:
    """``error`` for the user: what was to be read or written at ``path``, and what to do instead."""
    place = _existing(path)
    what = f"{path}: {error.strerror or error}"
    if error.errno in _FULL:
        need = f"{needed_bytes} bytes" if needed_bytes else "more bytes"
        with suppress(OSError):
            what += f" ({shutil.disk_usage(place).free} bytes free)"
        return StorageError(what, f"room for {need} in {place}", fix or f"free space in {place} or choose another path")
    if error.errno in _NO_PLACE and not place.is_dir():
        return StorageError(what, f"a folder, which {place} is not", fix or "choose another path")
    return StorageError(what, f"a path that this user can use in {place}", fix or "choose another path")


@contextmanager
def stored(path: Path, *, needed_bytes: int | None = None, fix: str = "") -> Iterator[None]:
    """Turns what the system refuses while ``path`` is written into a StorageError."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path, needed_bytes=needed_bytes, fix=fix) from error


@contextmanager
def new_file(path: Path, *, needed_bytes: int | None = None) -> Iterator[BinaryIO]:
    """A file to write that becomes ``path`` when the block ends well; missing folders are made.

    Raises StorageError; nothing is left beside ``path`` then.
    """
    path = _target(path)
    if path.exists() and not path.is_file():  # /dev/stdout, a FIFO: nothing to replace
        with stored(path, needed_bytes=needed_bytes), path.open("wb") as file:
            yield file
        return
    partial = _partial(path)
    try:
        with stored(path, needed_bytes=needed_bytes):
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("xb") as file:
                yield file
                sync(file)
            partial.replace(path)
            sync_folder(path.parent)
    finally:
        with suppress(OSError):
            partial.unlink()


def write_file(path: Path, data: bytes | str) -> None:
    """Write all of ``path`` or nothing. Raises StorageError."""
    encoded = data.encode() if isinstance(data, str) else data
    with new_file(path, needed_bytes=len(encoded)) as file:
        file.write(encoded)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, at a hidden place beside ``path``; :func:`put_in_place` moves it there. It is gone afterwards.

    Folders of writers that were killed are removed first. Raises StorageError.
    """
    path = _target(path)
    with stored(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        partial, lock = _locked_folder(path)
    try:
        with stored(path):
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def put_in_place(partial: Path, path: Path) -> None:
    """Move the folder ``partial`` to ``path``, whose older folder is removed. Of several writers the last one wins.

    At any moment ``path`` is an old folder, absent, or a new one: never a mix.
    """
    path = _target(path)
    while True:
        try:
            partial.rename(path)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        old = _partial(path)
        with suppress(FileNotFoundError):  # another writer may have moved it
            path.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    sync_folder(path.parent)


def sync(file: BinaryIO) -> None:
    """Have the file's bytes on the disk, so that a power cut after a rename leaves a whole file."""
    file.flush()
    with suppress(OSError):  # pipes, and file systems that know no sync
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have the folder's names on the disk."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _target(path: Path) -> Path:
    """Where ``path`` really is: a link stays one, and the file that it names is replaced."""
    return Path(os.path.realpath(path)) if path.is_symlink() else Path(os.path.abspath(path))


def _existing(path: Path) -> Path:
    """The nearest folder above ``path`` that exists, or what stands in the way of one."""
    for folder in Path(os.path.abspath(path)).parents:
        with suppress(OSError):
            if folder.exists():
                return folder
    return Path("/")


def _partial(path: Path) -> Path:
    return path.with_name(f"{_prefix(path)}{secrets.token_hex(8)}")


def _prefix(path: Path) -> str:
    return f".{path.name}.partial-"


def _locked_folder(path: Path) -> tuple[Path, int]:
    """A new hidden folder beside ``path``, and the descriptor that holds its lock."""
    while True:
        partial = _partial(path)
        partial.mkdir()
        try:
            lock = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:  # another writer took it for abandoned before it was locked
            continue
        with suppress(OSError):  # a file system without locks: no folder there is ever taken for abandoned
            fcntl.flock(lock, fcntl.LOCK_EX)
        if partial.exists():
            return partial, lock
        os.close(lock)


def _remove_abandoned(path: Path) -> None:
    prefix = _prefix(path)
    for folder in path.parent.iterdir():
        if not folder.name.startswith(prefix) or not folder.is_dir():
            continue
        with suppress(OSError):  # gone, somebody else's, or locked: its writer lives
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)

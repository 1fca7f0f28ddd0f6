"""The one-file form of an artifact: a zip with stored (not compressed) members in a fixed order.

Owns packing and unpacking. A packed artifact is unpacked once into the user's cache, under its manifest's digest, and
opened there like any folder, so that kernels can be loaded and weights mapped.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.manifest import decode_manifest, is_valid_name
from flexspec.errors import ArtifactError, StorageError
from flexspec.host.cache import FIX, in_cache, temporary_cache, writable_cache
from flexspec.host.files import new_file, new_folder, put_in_place, storage_error

_FIXED_DATE = (1980, 1, 1, 0, 0, 0)
_MODE_0644_FILE = 0o100644 << 16
_MAX_MANIFEST_BYTES = 64 << 20
# What zipfile is known to raise on damaged input.
_ZIP_ERRORS = (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, KeyError, OverflowError)


def pack_artifact(folder: Path, out: Path) -> Path:
    """Write the artifact ``folder`` as the single file ``out``; equal folders give equal bytes.

    Raises ArtifactError if ``folder`` is not an artifact.
    """
    try:
        manifest = decode_manifest((folder / layout.MANIFEST).read_bytes(), folder.name)
    except OSError:
        raise _not_an_artifact(folder, f"{folder.name} has no readable {layout.MANIFEST}") from None
    needed_bytes = sum(entry.size_bytes for entry in manifest.files.values())
    with new_file(out, needed_bytes=needed_bytes) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in (layout.MANIFEST, *sorted(manifest.files)):
            info = zipfile.ZipInfo(name, _FIXED_DATE)
            info.external_attr = _MODE_0644_FILE
            info.file_size = (folder / name).stat().st_size
            with (folder / name).open("rb") as source, archive.open(info, "w") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    return out


def unpack_to_cache(path: Path) -> Path:
    """Folder in the cache with the contents of the packed artifact ``path``; unpacked only the first time.

    Raises ArtifactError if the file is not a packed artifact or is damaged. The contents are not verified here.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = _check_members(path, archive)
            entry = _cache_entry(path, archive)
            cached = in_cache("artifacts", entry)
            if cached is not None and (cached / layout.MANIFEST).is_file():
                return cached
            try:
                return _extract(archive, members, writable_cache("artifacts") / entry)
            except StorageError as error:
                return _extract(archive, members, temporary_cache("artifacts", error) / entry)
    except (*_ZIP_ERRORS, OSError) as error:
        raise _not_an_artifact(path, f"{path.name}: {error}") from None


def forget_unpacked(path: Path) -> None:
    """Remove the folder that :func:`unpack_to_cache` made for ``path``; raises the same errors."""
    try:
        with zipfile.ZipFile(path) as archive:
            _check_members(path, archive)
            cached = in_cache("artifacts", _cache_entry(path, archive))
            if cached is not None:
                shutil.rmtree(cached, ignore_errors=True)
    except (*_ZIP_ERRORS, OSError) as error:
        raise _not_an_artifact(path, f"{path.name}: {error}") from None


def _cache_entry(path: Path, archive: zipfile.ZipFile) -> str:
    data = archive.read(layout.MANIFEST)
    decode_manifest(data, path.name)
    return f"{hashlib.sha256(data).hexdigest()[:32]}/{path.name}"


def _check_members(path: Path, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The members, after checking that they are plain stored files no larger in all than the archive."""
    members = archive.infolist()
    names = [member.filename for member in members]
    limit_bytes = path.stat().st_size
    plain = all(
        member.compress_type == zipfile.ZIP_STORED
        and not member.flag_bits & 1
        and member.file_size == member.compress_size
        and (member.filename == layout.MANIFEST or is_valid_name(member.filename))
        for member in members
    )
    if not plain or len(set(names)) != len(names) or sum(member.file_size for member in members) > limit_bytes:
        raise _not_an_artifact(path, f"{path.name} holds compressed, encrypted, repeated or oddly named members")
    if layout.MANIFEST not in names or archive.getinfo(layout.MANIFEST).file_size > _MAX_MANIFEST_BYTES:
        raise _not_an_artifact(path, f"{path.name} holds no {layout.MANIFEST}")
    return members


def _extract(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], folder: Path) -> Path:
    """Unpack to ``folder``. What the archive refuses is its own fault, what the disk refuses is a StorageError."""
    needed_bytes = sum(member.file_size for member in members)
    with new_folder(folder) as partial:
        for member in members:
            target = partial / member.filename
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
            except OSError as error:
                raise storage_error(error, folder, needed_bytes=needed_bytes, fix=FIX) from error
        put_in_place(partial, folder)
    return folder


def _not_an_artifact(path: Path, found: str) -> ArtifactError:
    return ArtifactError(found, "an artifact made by flexspec compile", f"make it: flexspec compile MODEL -o {path}")

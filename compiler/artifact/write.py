"""Writes an artifact: files into a hidden folder beside the target, manifest last, then one rename.

Owns how files get to disk, not what they mean. Nothing written depends on the time, the folder, the user or the
machine, so the same contents give the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from flexspec import __version__
from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.manifest import (
    FileEntry,
    Json,
    Manifest,
    canonical_json,
    encode_manifest,
    is_valid_name,
    rebuild_command,
)
from flexspec.compiler.artifact.tensor_file import AnyArray, encode_tensors
from flexspec.errors import ArtifactError

_COPY_BLOCK_BYTES = 1 << 20


class ArtifactWriter:
    """Context manager that creates the folder ``out``; without :meth:`finish` nothing is left behind.

    Raises ArtifactError if ``out`` exists and is not an artifact: other people's files are never replaced.
    """

    def __init__(self, out: Path) -> None:
        self._out = Path(os.path.abspath(out))
        _check_replaceable(self._out)
        self._out.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(self._out)
        self._folder = _partial_folder(self._out, os.getpid())
        self._folder.mkdir()
        self._files: dict[str, FileEntry] = {}

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def add_bytes(self, name: str, data: bytes) -> None:
        """Store ``data`` under the relative POSIX path ``name``."""
        self._write(name, [data])

    def add_json(self, name: str, value: Json) -> None:
        """Store ``value`` as canonical JSON (sorted keys). Raises ValueError or TypeError if JSON cannot hold it."""
        self._write(name, [canonical_json(value)])

    def add_tensors(self, name: str, tensors: Mapping[str, AnyArray], *, bf16: Collection[str] = ()) -> None:
        """Store arrays as a safetensors file with aligned data; ``bf16`` names uint16 arrays of bfloat16 bits."""
        self._write(name, encode_tensors(tensors, bf16=bf16))

    def add_file(self, name: str, source: Path) -> None:
        """Store a copy of the file ``source``."""
        with source.open("rb") as file:
            self._write(name, iter(lambda: file.read(_COPY_BLOCK_BYTES), b""))

    def finish(
        self,
        *,
        argv: Sequence[str],
        targets: Sequence[str],
        tools: Mapping[str, str],
        fields: Mapping[str, Json] | None = None,
    ) -> Path:
        """Write the manifest, move the folder into place and return its path. ``argv`` is the command being run."""
        manifest = Manifest(
            flexspec_version=__version__,
            targets=tuple(sorted(targets)),
            tools=dict(tools),
            rebuild=rebuild_command(argv),
            files=self._files,
            fields=dict(fields or {}),
        )
        # No fsync: after a power cut, the manifest's sizes and digests reveal an artifact that is only half written.
        (self._folder / layout.MANIFEST).write_bytes(encode_manifest(manifest))
        _replace(self._folder, self._out)
        return self._out

    def _write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        if not is_valid_name(name):
            raise ValueError(f"{name!r} is no name in an artifact: a plain relative path other than {layout.MANIFEST}")
        if name in self._files:
            raise ValueError(f"{name!r} was added before")
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        digest, size = hashlib.sha256(), 0
        with path.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        self._files[name] = FileEntry(size, digest.hexdigest())


def _check_replaceable(out: Path) -> None:
    if not out.exists() or (out / layout.MANIFEST).is_file() or (out.is_dir() and not any(out.iterdir())):
        return
    raise ArtifactError(
        f"{out.name} exists and is not an artifact folder",
        "a new path, or an artifact to replace",
        "choose another -o PATH, or remove it first",
    )


def _partial_folder(out: Path, pid: int) -> Path:
    return out.with_name(f".{out.name}.partial-{pid}")


def _remove_abandoned(out: Path) -> None:
    """Remove the hidden folders of this process and of dead writers of the same artifact."""
    prefix = _partial_folder(out, 0).name.removesuffix("0")
    for folder in out.parent.glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix)
        if not (pid.isdigit() and int(pid) != os.getpid() and Path(f"/proc/{pid}").exists()):
            shutil.rmtree(folder, ignore_errors=True)


def _replace(folder: Path, out: Path) -> None:
    """Move ``folder`` to ``out``. At any moment ``out`` is the old artifact, absent, or the new one: never a mix."""
    if not out.exists():
        folder.rename(out)
        return
    old = out.with_name(f"{folder.name}.old")
    out.rename(old)
    folder.rename(out)
    shutil.rmtree(old, ignore_errors=True)

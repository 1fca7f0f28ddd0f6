"""Writes an artifact: files into a hidden folder beside the target, manifest last, then one rename.

Owns how files get to disk, not what they mean. Nothing written depends on the time, the folder, the user or the
machine, so the same contents give the same bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
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
from flexspec.host.files import new_folder, put_in_place, storage_error, stored, sync, sync_folder

_COPY_BLOCK_BYTES = 1 << 20


class ArtifactWriter:
    """Context manager that creates the folder ``out``; without :meth:`finish` nothing is left behind.

    Raises ArtifactError if ``out`` exists and is not an artifact (other people's files are never replaced), and
    StorageError where it cannot be written.
    """

    def __init__(self, out: Path) -> None:
        self._out = Path(os.path.abspath(out))
        _check_replaceable(self._out)
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(new_folder(self._out))
        self._files: dict[str, FileEntry] = {}

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

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
        with stored(self._out):
            with (self._folder / layout.MANIFEST).open("xb") as file:
                file.write(encode_manifest(manifest))
                sync(file)
            for folder in {(self._folder / name).parent for name in self._files} | {self._folder}:
                sync_folder(folder)
            put_in_place(self._folder, self._out)
        return self._out

    def _write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        if not is_valid_name(name):
            raise ValueError(f"{name!r} is no name in an artifact: a plain relative path other than {layout.MANIFEST}")
        if name in self._files:
            raise ValueError(f"{name!r} was added before")
        path = self._folder / name
        digest, size = hashlib.sha256(), 0
        left = iter(chunks)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                for chunk in left:
                    size += len(chunk)
                    file.write(chunk)
                    digest.update(chunk)
                sync(file)
        except OSError as error:
            needed = size + sum(len(chunk) for chunk in left)
            raise storage_error(error, self._out / name, needed_bytes=needed) from error
        self._files[name] = FileEntry(size, digest.hexdigest())


def _check_replaceable(out: Path) -> None:
    if not out.exists() or (out / layout.MANIFEST).is_file() or (out.is_dir() and not any(out.iterdir())):
        return
    raise ArtifactError(
        f"{out.name} exists and is not an artifact folder",
        "a new path, or an artifact to replace",
        "choose another -o PATH, or remove it first",
    )

"""Opens an artifact (``NAME.fspec``, a folder or one file) and hands out its checked contents.

Owns reading and checking: format version, presence, sizes and digests are checked at open, so that a damaged file is
one clear error at start-up and never a crash in a kernel. Writing is in ``artifact/write.py``, the one-file form in
``artifact/zip.py``.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.manifest import FileEntry, Json, Manifest, decode_manifest
from flexspec.compiler.artifact.tensor_file import AnyArray, map_tensors
from flexspec.compiler.artifact.zip import forget_unpacked, unpack_to_cache
from flexspec.errors import ArtifactError

ALWAYS_HASHED_BYTES = 1 << 20  # files up to this size are hashed even when ``check_digests`` is off


@dataclass(frozen=True, slots=True)
class Artifact:
    """An opened artifact. ``root`` is its folder (in the cache for one that came as a single file)."""

    root: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """Path of a member. Raises ArtifactError if the artifact has no file of that name."""
        if name not in self.manifest.files:
            raise ArtifactError(f"{self.root.name} has no {name}", "an artifact with that file", self._fix())
        return self.root / name

    def fingerprint(self) -> str:
        """sha256 of the manifest, which has the digests of everything else: equal for equal artifacts."""
        return hashlib.sha256(self.root.joinpath(layout.MANIFEST).read_bytes()).hexdigest()

    def names(self, prefix: str = "") -> tuple[str, ...]:
        """Names of the members that start with ``prefix``, sorted."""
        return tuple(sorted(name for name in self.manifest.files if name.startswith(prefix)))

    def read_bytes(self, name: str) -> bytes:
        """Contents of a member. Raises ArtifactError if it is missing or cannot be read."""
        path = self.file(name)
        try:
            return path.read_bytes()
        except OSError as error:
            raise _unreadable(self.root, name, error, self._fix()) from None

    def read_json(self, name: str) -> Json:
        """A member parsed as JSON. Raises ArtifactError if it is missing or not JSON."""
        try:
            return json.loads(self.read_bytes(name))
        except (ValueError, RecursionError):
            raise ArtifactError(f"{self.root.name}: {name} is not JSON", "a JSON file", self._fix()) from None

    def tensors(self, name: str) -> dict[str, AnyArray]:
        """Tensors of a safetensors member: read-only views of the mapped file, bfloat16 as uint16.

        Raises ArtifactError if it is missing or malformed.
        """
        path = self.file(name)
        try:
            return map_tensors(path, fix=self._fix())
        except OSError as error:
            raise _unreadable(self.root, name, error, self._fix()) from None

    def _fix(self) -> str:
        return f"rebuild it: {self.manifest.rebuild}"


def open_artifact(path: Path, *, check_digests: bool = True) -> Artifact:
    """Open and check the artifact at ``path``.

    Sizes of all files and digests of small ones are always checked; ``check_digests=False`` skips the digests of large
    files (about 0.2 s per 300 MB). Raises ArtifactError naming the damaged file and the command that rebuilds it.
    """
    path = Path(path)
    if _is_model(path):
        artifact = (
            path.resolve().with_suffix(layout.SUFFIX).name
            if path.is_file()
            else f"{path.resolve().name}{layout.SUFFIX}"
        )
        raise ArtifactError(
            f"{path} is a model, not an artifact",
            "an artifact made by flexspec compile",
            f"compile it first: flexspec compile {shlex.quote(str(path))} -o {shlex.quote(artifact)} "
            f"(in Python: flexspec.compile({str(path)!r}, out={artifact!r})), then pass {artifact}",
        )
    if not path.is_file():
        return _open_folder(path, path, check_digests)
    try:
        return _open_folder(unpack_to_cache(path), path, check_digests)
    except ArtifactError:
        forget_unpacked(path)  # the copy in the cache may be damaged while the file itself is intact
        return _open_folder(unpack_to_cache(path), path, check_digests)


def _is_model(path: Path) -> bool:
    """A GGUF file, or a folder with a checkpoint's config.json and no manifest."""
    try:
        if path.is_dir():
            return (path / "config.json").is_file() and not (path / layout.MANIFEST).is_file()
        if not path.is_file():  # a pipe would wait for a writer
            return False
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _open_folder(root: Path, path: Path, check_digests: bool) -> Artifact:
    """Check and open the folder ``root`` of the artifact that the user named ``path``."""
    fix = f"make it: flexspec compile MODEL -o {path}"
    try:
        if not stat.S_ISREG((root / layout.MANIFEST).stat().st_mode):  # a pipe or a device never ends
            raise ArtifactError(f"{path}: {layout.MANIFEST} is not a regular file", "a readable artifact", fix)
        data = (root / layout.MANIFEST).read_bytes()
    except FileNotFoundError:
        what = f"{path} has no {layout.MANIFEST}" if path.exists() else f"{path} does not exist"
        raise ArtifactError(what, "an artifact made by flexspec compile", fix) from None
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror or error}", "a readable artifact", fix) from None
    manifest = decode_manifest(data, path.name)
    for name, entry in manifest.files.items():
        _check_file(root, name, entry, manifest.rebuild, check_digests)
    return Artifact(root, manifest)


def _check_file(root: Path, name: str, entry: FileEntry, rebuild: str, check_digests: bool) -> None:
    path, fix = root / name, f"rebuild it: {rebuild}"
    try:
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise ArtifactError(f"{root.name}: {name} is missing", f"a file of {entry.size_bytes} bytes", fix)
        if size != entry.size_bytes:
            raise ArtifactError(f"{root.name}: {name} has {size} bytes", f"{entry.size_bytes} bytes", fix)
        if (check_digests or size <= ALWAYS_HASHED_BYTES) and _sha256(path) != entry.sha256:
            raise ArtifactError(f"{root.name}: the contents of {name} changed", f"sha256 {entry.sha256}", fix)
    except OSError as error:
        raise _unreadable(root, name, error, fix) from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        if path.stat().st_size <= ALWAYS_HASHED_BYTES:
            return hashlib.sha256(file.read()).hexdigest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return hashlib.sha256(mapped).hexdigest()


def _unreadable(root: Path, name: str, error: OSError, fix: str) -> ArtifactError:
    return ArtifactError(f"{root.name}: {name}: {error.strerror or error}", "a readable file", fix)

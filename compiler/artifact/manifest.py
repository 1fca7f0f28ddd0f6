"""The manifest of an artifact: what is in the folder, what made it, and how to make it again.

Owns manifest.json: its text form, its own checksum, the rule for names inside an artifact. It reads and writes no
other file. The text is canonical (sorted keys, fixed separators), so equal contents are equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from flexspec.checked_table import MAX_COUNT, Table, show
from flexspec.compiler.artifact import layout
from flexspec.errors import ArtifactError

FORMAT_VERSION = 1

Json = Any  # what json.loads gives; checked where it is used

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]*(/[A-Za-z0-9_][A-Za-z0-9_.+@=-]*)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and digest of one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of manifest.json."""

    flexspec_version: str
    targets: tuple[str, ...]  # what the kernels were built for: cpu-amx, sm_90, ...
    tools: Mapping[str, str]  # versions of the tools that built it
    rebuild: str  # the command that builds it again
    files: Mapping[str, FileEntry]
    fields: Mapping[str, Json] = field(default_factory=dict)  # whatever else the compiler records
    format_version: int = FORMAT_VERSION


def damaged(found: str, expected: str) -> ArtifactError:
    """The error for an invalid table in an artifact."""
    return ArtifactError(found, expected, "compile the model again")


def is_valid_name(name: str) -> bool:
    """A relative POSIX path of plain components: no ``..``, no hidden file, nothing absolute, not the manifest."""
    return len(name) <= 255 and _NAME.fullmatch(name) is not None and name != layout.MANIFEST


def rebuild_command(argv: Sequence[str]) -> str:
    """``argv`` as one shell line; absolute paths are cut to their last part, so that it is the same on any machine."""
    return shlex.join(PurePosixPath(word).name if word.startswith("/") else word for word in argv)


def canonical_json(value: Json) -> bytes:
    """Bytes that depend on the value only. Raises ValueError or TypeError for what JSON cannot hold."""
    text = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def encode_manifest(manifest: Manifest) -> bytes:
    """The text of manifest.json, with a digest over everything else in it."""
    body: dict[str, Json] = {
        "format_version": manifest.format_version,
        "flexspec_version": manifest.flexspec_version,
        "targets": list(manifest.targets),
        "tools": dict(manifest.tools),
        "rebuild": manifest.rebuild,
        "files": {name: {"bytes": f.size_bytes, "sha256": f.sha256} for name, f in manifest.files.items()},
        "fields": dict(manifest.fields),
    }
    return canonical_json(body | {"sha256": hashlib.sha256(canonical_json(body)).hexdigest()})


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Parse and check manifest.json of the artifact ``where``.

    Raises ArtifactError unless it is an intact manifest of this format version.
    """
    fix = f"rebuild it: flexspec compile MODEL -o {where}"
    expected = f"{layout.MANIFEST} of an artifact of format version {FORMAT_VERSION}"
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise ArtifactError(f"{where}: {layout.MANIFEST} is not JSON", expected, fix) from None
    if not isinstance(body, dict) or type(body.get("format_version")) is not int:
        raise ArtifactError(f"{where}: {layout.MANIFEST} has no format_version", expected, fix)
    if body["format_version"] != FORMAT_VERSION:
        raise ArtifactError(f"{where}: format version {body['format_version']}", expected, fix)
    digest = body.pop("sha256", None)
    if digest != _digest(body):
        raise ArtifactError(f"{where}: {layout.MANIFEST} does not match its own checksum", expected, fix)
    # A right checksum with wrong types means that another program wrote it.
    return _read(Table(body, f"{where}: {layout.MANIFEST}", lambda found, wanted: ArtifactError(found, wanted, fix)))


def _digest(body: Json) -> str | None:
    try:
        return hashlib.sha256(canonical_json(body)).hexdigest()
    except (ValueError, RecursionError):  # NaN, lone surrogates: valid for json.loads, never written by us
        return None


def _read(table: Table) -> Manifest:
    tools = table.table("tools")
    manifest = Manifest(
        flexspec_version=table.text("flexspec_version"),
        targets=table.texts("targets"),
        tools={name: tools.text(name, blank=True) for name in tools.names()},
        rebuild=table.text("rebuild", blank=True),
        files={name: _read_entry(name, entry) for name, entry in table.tables("files").items()},
        fields=table.table("fields").body,
        format_version=table.count("format_version", FORMAT_VERSION, FORMAT_VERSION),
    )
    table.done()
    return manifest


def _read_entry(name: str, entry: Table) -> FileEntry:
    if not is_valid_name(name):
        raise entry.error("", show(name), "a relative path of plain names")
    size, digest = entry.count("bytes", MAX_COUNT, 0), entry.text("sha256")
    if not _SHA256.fullmatch(digest):
        raise entry.error("sha256", show(digest), "64 hexadecimal digits")
    entry.done()
    return FileEntry(size, digest)

"""A served artifact that is written in place is noticed; what only replaces its files is not a change."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flexspec.compiler.artifact.open import open_artifact
from flexspec.compiler.artifact.opened_files import OpenedFiles
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.errors import ArtifactError

NAME = "weights/llm.bin"


def build(out: Path, data: bytes = b"weights") -> Path:
    with ArtifactWriter(out) as writer:
        writer.add_bytes(NAME, data)
        writer.finish(argv=["flexspec", "compile"], targets=["cpu"], tools={})
    return out


def write_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"W")
    os.utime(path, ns=(0, 0))  # a later time, however coarse the file system's clock


def cut(path: Path) -> None:
    os.truncate(path, 3)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, 0))


def replace(path: Path) -> None:
    build(path.parents[1], b"other weights")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (write_in_place, f"the contents of {NAME} changed"),
        (cut, f"{NAME} has 3 bytes instead of 7"),
        (touch, ""),
        (replace, ""),
        (Path.unlink, ""),
    ],
)
def test_only_what_is_written_in_place_is_a_change(tmp_path: Path, change: Callable[[Path], None], found: str) -> None:
    files = OpenedFiles(open_artifact(build(tmp_path / "x.fspec")))
    assert files.changed() == ""
    change(tmp_path / "x.fspec" / NAME)
    assert files.changed() == found and files.changed() == found


def test_a_watched_change_is_told_once(tmp_path: Path) -> None:
    files = OpenedFiles(open_artifact(build(tmp_path / "x.fspec")))
    told, came = list[str](), threading.Event()

    def tell(what: str) -> None:
        told.append(what)
        came.set()

    end = files.watch(tell, period_s=0.001)
    cut(tmp_path / "x.fspec" / NAME)
    assert came.wait(30)
    end()
    assert told == [f"{NAME} has 3 bytes instead of 7"]


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_manifest_that_never_ends_is_refused(tmp_path: Path, kind: str) -> None:
    manifest = build(tmp_path / "x.fspec") / "manifest.json"
    manifest.unlink()
    if kind == "pipe":
        os.mkfifo(manifest)
    else:
        manifest.symlink_to("/dev/zero")
    with pytest.raises(ArtifactError, match="manifest.json is not a regular file"):
        open_artifact(tmp_path / "x.fspec")

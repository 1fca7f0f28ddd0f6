"""Artifacts: same bytes anywhere, all-or-nothing writing, checks at open, and one clear error for any damage."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.manifest import (
    canonical_json,
    decode_manifest,
    is_valid_name,
    rebuild_command,
)
from flexspec.compiler.artifact.open import Artifact, open_artifact
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.compiler.artifact.zip import pack_artifact
from flexspec.errors import ArtifactError

REBUILD = "flexspec compile model.gguf -o tiny.fspec"


def build(out: Path, note: str = "hello") -> Path:
    source = out.parent / "lib.bin"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_bytes(bytes(range(256)) * 10)
    with ArtifactWriter(out) as writer:
        writer.add_json("graph/llm.json", {"b": 1, "a": [1.5, note]})
        writer.add_bytes("kernels/cpu/source.cpp", b"int x;\n")
        writer.add_file("kernels/cpu/library.so", source)
        writer.add_tensors("weights/llm.safetensors", {"w": np.arange(4096, dtype=np.float32), "q": np.arange(9)})
        return writer.finish(
            argv=["flexspec", "compile", "/data/models/model.gguf", "-o", "tiny.fspec"],
            targets=["x86-64-avx2", "sm_90"],
            tools={"g++": "12.2.0"},
            fields={"model": {"layers": 2}},
        )


def contents(artifact: Artifact) -> dict[str, bytes]:
    return {name: artifact.read_bytes(name) for name in artifact.names()}


def tree_bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSPEC_CACHE", str(tmp_path / "cache"))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    artifact = open_artifact(build(tmp_path / "tiny.fspec"))
    assert artifact.read_json("graph/llm.json") == {"a": [1.5, "hello"], "b": 1}
    assert artifact.file("kernels/cpu/library.so").stat().st_size == 2560
    assert artifact.names("kernels/") == ("kernels/cpu/library.so", "kernels/cpu/source.cpp")
    np.testing.assert_array_equal(artifact.tensors("weights/llm.safetensors")["q"], np.arange(9))
    assert artifact.manifest.targets == ("sm_90", "x86-64-avx2")
    assert artifact.manifest.tools == {"g++": "12.2.0"}
    assert artifact.manifest.fields == {"model": {"layers": 2}}
    assert artifact.manifest.rebuild == REBUILD


def test_two_folders_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = build(tmp_path / "a" / "tiny.fspec"), build(tmp_path / "b" / "c" / "other.fspec")
    os.utime(first / layout.MANIFEST, (0, 0))
    assert tree_bytes(first) == tree_bytes(second)
    packed = [pack_artifact(folder, tmp_path / f"{i}.fspec").read_bytes() for i, folder in enumerate((first, second))]
    assert packed[0] == packed[1]
    assert str(tmp_path).encode() not in packed[0]


def test_packed_artifact_opens_like_the_folder_and_is_unpacked_once(tmp_path: Path) -> None:
    folder = build(tmp_path / "tiny.fspec")
    packed = pack_artifact(folder, tmp_path / "packed.fspec")
    once, twice = open_artifact(packed), open_artifact(packed)
    assert contents(once) == contents(open_artifact(folder))
    assert once.root == twice.root
    with zipfile.ZipFile(packed) as archive:
        assert {member.compress_type for member in archive.infolist()} == {zipfile.ZIP_STORED}


def test_a_damaged_cache_is_unpacked_again(tmp_path: Path) -> None:
    packed = pack_artifact(build(tmp_path / "tiny.fspec"), tmp_path / "packed.fspec")
    first = open_artifact(packed)
    sound = contents(first)
    first.file("kernels/cpu/library.so").write_bytes(b"cut")
    assert contents(open_artifact(packed)) == sound


def test_an_unfinished_artifact_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "tiny.fspec"
    with pytest.raises(RuntimeError, match="compiler broke"), ArtifactWriter(out) as writer:
        writer.add_bytes("a", b"1")
        raise RuntimeError("compiler broke")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_does_not_harm_the_old_artifact(tmp_path: Path) -> None:
    out = build(tmp_path / "tiny.fspec")
    before = tree_bytes(out)
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from flexspec.compiler.artifact.write import ArtifactWriter\n"
        "writer = ArtifactWriter(Path(sys.argv[1])); writer.add_bytes('a', b'1'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(out)], check=False)
    assert killed.returncode == -9
    assert tree_bytes(out) == before
    assert len(list(tmp_path.glob(".tiny.fspec.partial-*"))) == 1
    build(out, note="new")
    assert open_artifact(out).read_json("graph/llm.json")["a"][1] == "new"
    assert list(tmp_path.glob(".*")) == []


def test_other_peoples_files_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    with pytest.raises(ArtifactError, match="not an artifact"):
        ArtifactWriter(tmp_path / "notes")
    with pytest.raises(ArtifactError, match="not an artifact"):
        ArtifactWriter(tmp_path / "notes" / "thesis.txt")


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../b", "a//b", "a\\b", ".hidden", "a/.b", "manifest.json"])
def test_bad_names_are_refused(tmp_path: Path, name: str) -> None:
    assert not is_valid_name(name)
    with ArtifactWriter(tmp_path / "x") as writer, pytest.raises(ValueError, match="no name"):
        writer.add_bytes(name, b"")


def test_names_are_written_once(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "x") as writer:
        writer.add_bytes("a", b"1")
        with pytest.raises(ValueError, match="added before"):
            writer.add_bytes("a", b"2")


def test_rebuild_command_has_no_absolute_paths() -> None:
    assert rebuild_command(["flexspec", "compile", "/a/b c.gguf", "-o", "x.fspec"]) == (
        "flexspec compile 'b c.gguf' -o x.fspec"
    )


def test_missing_and_foreign_paths_say_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "text.fspec").write_text("not a zip")
    (tmp_path / "empty").mkdir()
    for name, says in (("nowhere", "does not exist"), ("empty", "has no manifest"), ("text.fspec", "not a zip")):
        with pytest.raises(ArtifactError, match=says) as caught:
            open_artifact(tmp_path / name)
        assert f"flexspec compile MODEL -o {tmp_path / name}" in caught.value.fix


def test_errors_name_the_file_and_the_rebuild_command(tmp_path: Path) -> None:
    out = build(tmp_path / "tiny.fspec")
    library = out / "kernels/cpu/library.so"
    original = library.read_bytes()

    library.write_bytes(original[:-1])
    with pytest.raises(ArtifactError, match=r"library\.so has 2559 bytes.*2560") as caught:
        open_artifact(out)
    assert REBUILD in caught.value.fix

    library.write_bytes(original[:-1] + b"?")
    with pytest.raises(ArtifactError, match=r"contents of kernels/cpu/library\.so changed"):
        open_artifact(out)

    library.unlink()
    with pytest.raises(ArtifactError, match=r"library\.so is missing"):
        open_artifact(out)

    with pytest.raises(ArtifactError, match=r"has no kernels/none"):
        Artifact(out, decode_manifest((out / layout.MANIFEST).read_bytes(), "")).file("kernels/none")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda body: body.pop("tools"), "tools: missing"),
        (lambda body: body.update(targets="sm_90"), "targets: 'sm_90'"),
        (lambda body: body.update(extra=1), "extra: an unknown key"),
        (lambda body: body["files"].update({"../x": {"bytes": 1, "sha256": "0" * 64}}), r"files\.\.\./x: '\.\./x'"),
        (lambda body: body["files"]["kernels/cpu/library.so"].update(bytes=-1), "library.so.bytes: -1"),
        (lambda body: body["files"]["kernels/cpu/library.so"].update(sha256="00"), "library.so.sha256: '00'"),
    ],
)
def test_a_manifest_of_another_program_is_refused_key_by_key(
    tmp_path: Path, edit: Callable[[Any], object], words: str
) -> None:
    """Its own checksum is right."""
    body = json.loads((build(tmp_path / "tiny.fspec") / layout.MANIFEST).read_bytes())
    body.pop("sha256")
    edit(body)
    signed = body | {"sha256": hashlib.sha256(canonical_json(body)).hexdigest()}
    with pytest.raises(ArtifactError, match=words) as caught:
        decode_manifest(canonical_json(signed), "x.fspec")
    assert "flexspec compile MODEL -o x.fspec" in caught.value.fix


def test_open_without_digests_still_hashes_small_files(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "x") as writer:
        writer.add_bytes("small", b"12")
        writer.add_bytes("large", bytes(1 << 21))
        out = writer.finish(argv=["flexspec"], targets=[], tools={})
    (out / "large").write_bytes(b"1" + bytes((1 << 21) - 1))
    open_artifact(out, check_digests=False)
    with pytest.raises(ArtifactError, match="contents of large changed"):
        open_artifact(out)
    (out / "small").write_bytes(b"21")
    with pytest.raises(ArtifactError, match="contents of small changed"):
        open_artifact(out, check_digests=False)


def test_another_format_version_is_named(tmp_path: Path) -> None:
    out = build(tmp_path / "tiny.fspec")
    body = json.loads((out / layout.MANIFEST).read_bytes())
    (out / layout.MANIFEST).write_bytes(canonical_json(body | {"format_version": 99}))
    with pytest.raises(ArtifactError, match="format version 99"):
        open_artifact(out)


def damage(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "cut", "grow", "zero", "swap"])
    at = rng.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "grow":
        data[at:at] = rng.randbytes(rng.randrange(1, 40))
    elif kind == "zero":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    else:
        data[at : at + 16] = data[at : at + 16][::-1]
    path.write_bytes(data)


@pytest.mark.parametrize("packed", [False, True])
def test_any_damage_is_an_artifact_error_or_harmless(tmp_path: Path, packed: bool) -> None:
    folder = build(tmp_path / "tiny.fspec")
    sound = contents(open_artifact(folder))
    rng = random.Random(20260401)
    refused = 0
    for i in range(100):
        copy = tmp_path / f"copy{i}"
        if packed:
            victim = pack_artifact(folder, copy)
        else:
            shutil.copytree(folder, copy)
            victim = rng.choice(sorted(p for p in copy.rglob("*") if p.is_file()))
        damage(rng, victim)
        try:
            artifact = open_artifact(copy)
            seen = contents(artifact)
            artifact.read_json("graph/llm.json")
            artifact.tensors("weights/llm.safetensors")
        except ArtifactError:
            refused += 1
        else:
            assert seen == sound, f"damage {i} to {victim.name} was not noticed"
    assert refused > 60

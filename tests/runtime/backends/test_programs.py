"""Programs as they are opened: a rank's is held against its digest and its weights, as a whole model's is."""

from __future__ import annotations

from pathlib import Path

import pytest
from artifacts import PLAN, changed_copy, changed_json
from rank_servers import PLANS, STAGES, artifacts_for_ranks

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.errors import ArtifactError
from flexspec.kernels.cpu import build
from flexspec.kernels.cpu.build import build_path, supported_isas
from flexspec.runtime.backends.programs import CpuPrograms
from flexspec.runtime.backends.registry import Needs
from flexspec.runtime.executors.room import Room

BEST = supported_isas()[0]
RANKS = [(name, rank) for name in STAGES for rank in range(sum(stage.degree for stage in STAGES[name]))]


@pytest.fixture(scope="module")
def folder() -> Path:
    return artifacts_for_ranks(PLANS, PLAN)


def spoil(data: bytes) -> bytes:
    """A bit here and there behind the header: some lie in rows or padding that the seeded step does not read."""
    changed = bytearray(data)
    for at in range(len(data) // 2, len(data), 1001):
        changed[at] ^= 1
    return bytes(changed)


def open_rank(path: Path, rank: int, *, checks: bool = True) -> None:
    needs = Needs(tree_rows=1, threads=1, checks=checks)
    CpuPrograms.of(OpenedArtifact.at(path), needs).rank(rank, Room(max_rows=16, pages=8)).close()


@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_every_rank_has_a_digest_and_computes_it(folder: Path, name: str, rank: int) -> None:
    opened = OpenedArtifact.at(folder / f"{name}{layout.SUFFIX}")
    others = {opened.digest(layout.rank_name(record.rank), BEST) for record in opened.ranks}
    assert None not in others and len(others) == len(opened.ranks)
    open_rank(opened.files.root, rank)


@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_a_rank_with_other_weights_is_refused(folder: Path, tmp_path: Path, name: str, rank: int) -> None:
    weights = layout.packed_weights(layout.rank_name(rank))
    path = changed_copy(folder / f"{name}{layout.SUFFIX}", tmp_path / "w.fspec", weights, spoil, signed=True)
    with pytest.raises(ArtifactError, match=f"llm.rank{rank} on {BEST} computes other values"):
        open_rank(path, rank)
    open_rank(path, rank, checks=False)


def test_a_rank_whose_program_computes_otherwise_is_refused(folder: Path, tmp_path: Path) -> None:
    """It loads, fits its weights and has the sizes of its graph; only the norms add another epsilon."""
    artifact, name = folder / "pp2.fspec", layout.rank_name(0)
    source = OpenedArtifact.at(artifact).files.read_bytes(layout.cpu_source(name)).decode()
    assert "1e-05f" in source
    other = build_path(source.replace("1e-05f", "1e-03f"), BEST).read_bytes()
    path = changed_copy(artifact, tmp_path / "p.fspec", layout.cpu_library(name, BEST), lambda _: other, signed=True)
    with pytest.raises(ArtifactError, match=f"{name} on {BEST} computes other values"):
        open_rank(path, 0)
    open_rank(path, 0, checks=False)


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize(("other", "found"), [("no library", "not a program"), ("rank 0's", rf"(for|of) {BEST}\.so")])
def test_a_rank_with_no_program_or_another_ranks_is_refused(
    folder: Path, tmp_path: Path, other: str, found: str, checks: bool
) -> None:
    artifact = folder / "pp2.fspec"
    first = OpenedArtifact.at(artifact).library(layout.rank_name(0), BEST).read_bytes()
    library = layout.cpu_library(layout.rank_name(1), BEST)
    data = b"none" if other == "no library" else first
    path = changed_copy(artifact, tmp_path / "p.fspec", library, lambda _: data, signed=True)
    with pytest.raises(ArtifactError, match=found):
        open_rank(path, 1, checks=checks)


def test_a_program_of_an_earlier_version_names_the_command_that_rebuilds_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, name = folder / "pp2.fspec", layout.rank_name(0)
    source = OpenedArtifact.at(artifact).files.read_bytes(layout.cpu_source(name)).decode()
    earlier = tuple(flag.replace(f"FS_ABI={build.ABI}", f"FS_ABI={build.ABI - 1}") for flag in build._COMMON)
    monkeypatch.setattr(build, "_COMMON", earlier)
    other = build_path(source, BEST).read_bytes()
    path = changed_copy(artifact, tmp_path / "p.fspec", layout.cpu_library(name, BEST), lambda _: other, signed=True)
    refusal = rf"{BEST}\.so has ABI {build.ABI - 1}; expected ABI {build.ABI}\. Fix: rebuild it: flexspec compile"
    with pytest.raises(ArtifactError, match=refusal):
        open_rank(path, 0)


def test_a_tensor_that_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    path = changed_json(
        folder / "tp2.fspec", tmp_path / "t.fspec", layout.RANKS,
        lambda body: body["ranks"][1]["weights"].__setitem__(0, "nothing"),
    )  # fmt: skip
    with pytest.raises(ArtifactError, match=r"no tensor nothing for llm\.rank1"):
        open_rank(path, 1)

"""Programs as they are opened: a rank's is held against its digest and its weights, as a whole model's is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from artifacts import PLAN, changed_copy, changed_json
from rank_servers import PLANS, STAGES, artifacts_for_ranks

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.errors import ArtifactError
from flexspec.kernels.cpu.build import supported_isas
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


@pytest.mark.parametrize(("change", "found"), [(lambda _: b"none", "not a program"), (None, "computes other values")])
def test_a_rank_with_another_program_is_refused(
    folder: Path, tmp_path: Path, change: Callable[[bytes], bytes] | None, found: str
) -> None:
    """One that is no library, and that of another rank: it fits the weights, and meets the others elsewhere."""
    artifact = folder / "tp2.fspec"
    library = layout.cpu_library("llm.rank1", BEST)
    if change is not None:
        path = changed_copy(artifact, tmp_path / "p.fspec", library, change, signed=True)
    else:
        path = changed_json(
            artifact, tmp_path / "p.fspec", layout.CHECKS,
            lambda checks: checks | {"llm.rank1": checks["llm.rank0"]},
        )  # fmt: skip
    with pytest.raises(ArtifactError, match=found):
        open_rank(path, 1)


def test_a_tensor_that_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    path = changed_json(
        folder / "tp2.fspec", tmp_path / "t.fspec", layout.RANKS,
        lambda body: body["ranks"][1]["weights"].__setitem__(0, "nothing"),
    )  # fmt: skip
    with pytest.raises(ArtifactError, match=r"no tensor nothing for llm\.rank1"):
        open_rank(path, 1)

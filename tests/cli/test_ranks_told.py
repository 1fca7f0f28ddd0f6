"""A shell that inherited torchrun's variables is told why serve waits for other ranks."""

from __future__ import annotations

import pytest

from flexspec.cli.ranks import LAUNCHER, check_launched
from flexspec.errors import CapacityError

TOLD = "flexspec serve: rank 0 of 2, as RANK and WORLD_SIZE say (unset them to serve alone)\n"


@pytest.mark.parametrize(
    ("launcher", "rank", "told"),
    [(None, "0", TOLD), (None, "1", ""), ("1", "0", "")],
)
def test_the_variables_that_made_it_a_rank_are_named(
    launcher: str | None, rank: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(LAUNCHER, raising=False)
    if launcher:
        monkeypatch.setenv(LAUNCHER, launcher)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_launched(0)
    assert capsys.readouterr().err == told


def test_restarts_are_torchruns_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHER, raising=False)
    with pytest.raises(CapacityError, match="max-restarts"):
        check_launched(1)

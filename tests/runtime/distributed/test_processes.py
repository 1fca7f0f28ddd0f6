"""Processes that are ranks: their place from the environment, lines to rank 0 and back, and how they fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexspec.errors import CapacityError
from flexspec.runtime.distributed.processes import RankPlace, RanksFailed, rank_environments, start_ranks, this_rank

MODULE = """
import json, os, sys, time
rank, does = os.environ["RANK"], json.loads(sys.argv[1])
for line in sys.stdin:
    if line == "end\\n":
        sys.exit("the leader has ended")
    print(rank + " " + line.upper(), end="", flush=True)
if does.get("says"):
    sys.exit("noise\\n" + does["says"])
if rank == does.get("fails"):
    sys.exit("what rank " + rank + " said last")
if rank == does.get("hangs"):
    time.sleep(600)
print(json.dumps({key: os.environ[key] for key in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "OMP_NUM_THREADS")}))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_rank.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "a_rank"


@pytest.mark.parametrize(
    ("variables", "place", "here"),
    [
        ({}, RankPlace(), range(1)),
        ({"RANK": "0"}, RankPlace(launched=True), range(1)),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            RankPlace(5, 8, 1, 4, launched=True),
            range(4, 8),
        ),
    ],
)
def test_a_process_knows_its_place(variables: dict[str, str], place: RankPlace, here: range) -> None:
    assert this_rank(variables) == place and place.on_this_host == here


def test_a_place_that_is_no_number_is_refused() -> None:
    with pytest.raises(CapacityError, match="WORLD_SIZE='two'"):
        this_rank({"WORLD_SIZE": "two"})


def test_the_environment_of_a_rank_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    environments = rank_environments(3)
    assert [this_rank(each) for each in environments] == [RankPlace(i, 3, i, 3, launched=True) for i in range(3)]
    (port,) = {each["MASTER_PORT"] for each in environments}
    assert port != "1" and {each["GLOO_SOCKET_IFNAME"] for each in environments} == {"lo"}


def test_rank_0_answers_and_all_end_with_its_input(module: str) -> None:
    with start_ranks(module, ["{}"], 2) as ranks:
        assert ranks.ask("first") == "0 FIRST\n"
        assert ranks.ask("second") == "0 SECOND\n"
        first, second = map(json.loads, ranks.finish(60))
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("0", "1", "2")
    assert first["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("does", "within_s", "text"),
    [
        ({"fails": "1"}, 60, "what rank 1 said last"),
        ({"fails": "0"}, 60, "what rank 0 said last"),
        ({"says": "no torch"}, 60, "no torch"),  # said by both, told once
        ({"hangs": "1"}, 0.0, "not finished within 0 s"),
    ],
)
def test_a_rank_that_fails_is_told_by_its_last_line(
    module: str, does: dict[str, str], within_s: float, text: str
) -> None:
    with start_ranks(module, [json.dumps(does)], 2) as ranks, pytest.raises(RanksFailed) as caught:
        ranks.finish(within_s)
    assert str(caught.value) == text


def test_asking_a_leader_that_has_ended_fails(module: str) -> None:
    with start_ranks(module, ["{}"], 1) as ranks, pytest.raises(RanksFailed, match="the leader has ended"):
        ranks.ask("end")


def test_ranks_are_gone_when_the_caller_fails(module: str) -> None:
    with pytest.raises(ZeroDivisionError), start_ranks(module, ['{"hangs": "1"}'], 2) as ranks:
        processes = list(ranks._processes)
        raise ZeroDivisionError
    assert all(process.returncode is not None for process in processes)

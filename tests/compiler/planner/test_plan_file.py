"""Plan files for compile: JSON and TOML, and plans that cannot be run are refused before anything is built."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flexspec.compiler.artifact.plan import Plan, Stage
from flexspec.compiler.artifact.rank_record import RankRecord, ranks_from_json
from flexspec.compiler.artifact.ssm_place import place_named
from flexspec.compiler.planner.plan_file import check_runnable, read_hand_plan, read_plan
from flexspec.draft_plan import DraftLadder, DraftPlan
from flexspec.errors import ArtifactError, PlanError

OFF, CHAIN = DraftPlan("off"), DraftPlan.parse("chain:4")
PLAN = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2,))), ((0,),), DraftLadder.of(CHAIN), "hand")
TOML = 'ssm = "first"\n[[stages]]\nblocks = 1\ndevices = [4, 2]\n[[stages]]\nblocks = 1\ndevices = [0]\n'


def test_json_and_toml(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN.to_json()))
    assert read_plan(tmp_path / "plan.json", 1, OFF) == PLAN
    (tmp_path / "plan.toml").write_text(TOML)
    found = read_plan(tmp_path / "plan.toml", 1, CHAIN)
    assert (found.stages, found.ssm_ranks, found.devices) == (PLAN.stages, PLAN.ssm_ranks, (4, 2, 0))
    assert found.ladder == DraftLadder.of(CHAIN)
    check_runnable(found, 2, 1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('ssm = "first"', "plan.toml: stages: missing"),
        ("blocks = 1", "plan.toml: blocks: an unknown key; expected only batch, draft"),
        ("[[stages]]\nblocks = 1\ndevises = [0]", r"stages\[0\].devises: an unknown key; expected perhaps devices"),
        (f"colour = 1\n{TOML}", "plan.toml: colour: an unknown key"),
        ("stages = []", r"plan.toml: stages: \[\]"),
        ("stages = 3", "plan.toml: stages: 3"),
        (TOML.replace("[0]", "[4]"), r"stages\[1\].devices: device 4 again"),
        (TOML.replace("[0]", "[-1]"), r"stages\[1\].devices: \[-1\]"),
        (TOML.replace("[0]", "[true]"), r"stages\[1\].devices: \[True\]"),
        (TOML.replace("blocks = 1", "blocks = -1"), r"stages\[0\].blocks: -1"),
        (TOML.replace("blocks = 1", "blocks = inf"), r"stages\[0\].blocks: inf"),
        (f"micro_batches = 1.5\n{TOML}", "micro_batches: 1.5"),
        (f"draft = 7\n{TOML}", "draft: 7"),
        ("[", "plan.toml"),
        ("x = " + "[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_toml_is_named(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(PlanError, match=found):
        read_plan(tmp_path / "plan.toml", 1, OFF)


def test_own_devices_become_ranks_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(TOML.replace('"first"', '"own"\nssm_devices = [7]'))
    found = read_plan(tmp_path / "plan.toml", 1, CHAIN)
    assert (found.ssm_ranks, found.devices, found.ssm_place) == (((3,),), (4, 2, 0, 7), "own")
    check_runnable(found, 2, 1)
    with pytest.raises(PlanError, match="1 SSMs"):
        check_runnable(found, 2, 2)


@pytest.mark.parametrize(("place", "ranks"), [("last", (2,)), ("first", (0,)), ("all", (0, 1, 2))])
def test_both_forms_are_one_plan(tmp_path: Path, place: str, ranks: tuple[int, ...]) -> None:
    """TOML to the record to JSON and back to what a person would have written."""
    (tmp_path / "plan.toml").write_text(TOML.replace('"first"', f'"{place}"\ndraft = "chain:4"\nmicro_batches = 1'))
    plan = read_plan(tmp_path / "plan.toml", 1, OFF)
    assert plan.ssm_ranks == (ranks,)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    assert read_plan(tmp_path / "plan.json", 1, OFF) == plan
    again = read_hand_plan(tmp_path / "plan.json", 3)
    assert replace(again, source="") == replace(read_hand_plan(tmp_path / "plan.toml", 3), source="")
    unsaid = replace(plan, ssm_place="")
    (tmp_path / "plan.json").write_text(json.dumps(unsaid.to_json()))
    assert read_hand_plan(tmp_path / "plan.json", 3).place == place_named(place)


def test_bad_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[1]")
    with pytest.raises(PlanError, match="a list"):
        read_plan(tmp_path / "plan.json", 1, OFF)
    with pytest.raises(PlanError, match="nothing.json"):
        read_plan(tmp_path / "nothing.json", 1, OFF)
    (tmp_path / "plan.json").write_text('{"stages": [], "stages": []}')
    with pytest.raises(PlanError, match="duplicate key 'stages'"):
        read_plan(tmp_path / "plan.json", 1, OFF)


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (replace(PLAN, stages=(Stage(0, 2, (1, 2)),)), r"stages: ranks \[\[1, 2\]\]"),
        (replace(PLAN, stages=(Stage(0, 3, (0,)),)), "plan: stages: 3 blocks; expected 2"),
        (replace(PLAN, ssm_ranks=()), "0 SSMs"),
        (replace(PLAN, ssm_ranks=((0, 0),)), r"ssm_ranks: \[0, 0\]"),
        (replace(PLAN, ssm_ranks=((),)), r"ssm_ranks: \[\]"),
        (replace(PLAN, ssm_ranks=((4,),)), r"ranks \[0, 1, 2, 4\]; expected 4 ranks"),
        (replace(PLAN, stages=(Stage(0, 2, (1,)),), ssm_ranks=((0,),)), r"ranks \[\[1\]\]; expected rank 0"),
        (replace(PLAN, micro_batches=(1, 17)), r"micro_batches: \[1, 17\]"),
        (replace(PLAN, micro_batches=(0,)), r"micro_batches: \[0\]"),
    ],
)
def test_plans_that_ranks_cannot_run_are_refused(plan: Plan, found: str) -> None:
    with pytest.raises(PlanError, match=found):
        check_runnable(plan, 2, 1)


def test_ranks_of_an_artifact_are_checked() -> None:
    records = [RankRecord(0, 0, False, ("000.matrix",), ()), RankRecord(1, 1, True, (), ((0, 1),))]
    bodies = [record.to_json() for record in records]
    assert ranks_from_json(json.loads(json.dumps({"ranks": bodies}))) == tuple(records)
    for bad in ([], bodies[1:], bodies[:1], [bodies[0], {**bodies[1], "groups": [[0, 7]]}], [{"rank": 0}], 3):
        with pytest.raises(ArtifactError, match="ranks.json"):
            ranks_from_json({"ranks": bad})


@pytest.mark.parametrize("name", ["no.toml", "no.json"])
def test_a_plan_that_is_not_there(tmp_path: Path, name: str) -> None:
    for read in (lambda path: read_plan(path, 1, OFF), lambda path: read_hand_plan(path, 1)):
        with pytest.raises(PlanError) as error:
            read(tmp_path / name)
        assert f"{tmp_path / name}: does not exist; expected a plan" in str(error.value)
        assert "Fix: check the path" in str(error.value)


@pytest.mark.parametrize(("name", "text"), [("plan.toml", "blocks = 1"), ("plan.json", "{}")])
def test_errors_name_the_path_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("in", name).write_text(text)
    with pytest.raises(PlanError, match=f"FS[0-9]+: in/{name}: "):
        read_plan(Path("in", name), 1, OFF)

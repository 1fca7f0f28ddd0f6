"""Plan files for compile: JSON and TOML, and plans that cannot be run are refused before anything is built."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flexspec.compiler.plan import Plan, Stage
from flexspec.compiler.plan_file import check_runnable, read_plan_file
from flexspec.compiler.rank_record import RankRecord, ranks_from_json
from flexspec.errors import ArtifactError, PlanError

PLAN = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2,))), ((0,),), ((1 << 30, "chain:4"),), "hand")
TOML = 'ssm = "first"\n[[stages]]\nblocks = 1\ndevices = [4, 2]\n[[stages]]\nblocks = 1\ndevices = [0]\n'


def test_json_and_toml(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN.to_json()))
    assert read_plan_file(tmp_path / "plan.json", 1, "off") == PLAN
    (tmp_path / "plan.toml").write_text(TOML)
    found = read_plan_file(tmp_path / "plan.toml", 1, "chain:4")
    assert (found.stages, found.ssm_ranks, found.devices) == (PLAN.stages, PLAN.ssm_ranks, (4, 2, 0))
    assert found.draft_for(1) == "chain:4"
    check_runnable(found, 2, 1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("blocks = 1", "unknown key blocks"),
        ("stages = []", "devices"),
        ("stages = 3", "stages"),
        (TOML.replace("[0]", "[4]"), r"devices \[4, 2, 4\]"),
        ("[", "plan.toml"),
    ],
)
def test_bad_toml_is_named(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(PlanError, match=found):
        read_plan_file(tmp_path / "plan.toml", 1, "off")


def test_bad_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[1]")
    with pytest.raises(PlanError, match="a list"):
        read_plan_file(tmp_path / "plan.json", 1, "off")
    with pytest.raises(PlanError, match="nothing.json"):
        read_plan_file(tmp_path / "nothing.json", 1, "off")


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (replace(PLAN, stages=(Stage(0, 2, (1, 2)),)), r"ranks \[1, 2\]"),
        (replace(PLAN, stages=(Stage(0, 3, (0,)),)), "3 blocks"),
        (replace(PLAN, ssm_ranks=()), "0 SSMs"),
        (replace(PLAN, ssm_ranks=((0, 0),)), r"SSMs on ranks \[\(0, 0\)\]"),
        (replace(PLAN, ssm_ranks=((),)), r"SSMs on ranks \[\(\)\]"),
        (replace(PLAN, ssm_ranks=((4,),)), r"\[\(4,\)\] for its SSMs"),
        (replace(PLAN, stages=(Stage(0, 2, (1,)),), ssm_ranks=((0,),)), r"ranks \[1\] in its stages"),
        (replace(PLAN, micro_batches=(1, 17)), r"micro-batches \[1, 17\]"),
        (replace(PLAN, micro_batches=(0,)), "micro-batches"),
    ],
)
def test_plans_that_ranks_cannot_run_are_refused(plan: Plan, found: str) -> None:
    with pytest.raises(PlanError, match=found):
        check_runnable(plan, 2, 1)


def test_ranks_of_an_artifact_are_checked() -> None:
    records = [RankRecord(0, 0, False, ("000.matrix",), ()), RankRecord(1, 1, True, (), ((0, 1),))]
    bodies = [record.to_json() for record in records]
    assert ranks_from_json(json.loads(json.dumps({"ranks": bodies})), "x") == tuple(records)
    for bad in ([], bodies[1:], bodies[:1], [bodies[0], {**bodies[1], "groups": [[0, 7]]}], [{"rank": 0}], 3):
        with pytest.raises(ArtifactError, match="ranks.json"):
            ranks_from_json({"ranks": bad}, "x")

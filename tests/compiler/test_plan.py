"""The plan record: its JSON form, old files, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from flexspec.compiler.plan import Plan, Stage, plan_from_json, single_rank
from flexspec.errors import ArtifactError

OLD: dict[str, Any] = {
    "stages": [{"first_block": 0, "end_block": 4, "ranks": [0]}],
    "ssm_ranks": [[0]],
    "ladder": [[1 << 30, "off"]],
    "origin": "default",
}


def test_plans_written_before_searches_are_read_and_written_as_they_were() -> None:
    plan = plan_from_json(OLD)
    assert plan == single_rank(4, 1, "off")
    assert set(plan.to_json()) == set(OLD)


def test_a_searched_plan_comes_back() -> None:
    plan = Plan(
        (Stage(0, 3, (0, 1)), Stage(3, 4, (2,))), ((3,),), ((1, "chain:2"), (8, "off")), "search", (0, 1, 4, 7), (1, 2),
        "own", "mixed", (("period_us", 3.5),), (("gap", 0.0), ("proven", True)),
    )  # fmt: skip
    assert plan_from_json(plan.to_json()) == plan
    assert [plan.draft_for(batch) for batch in (1, 2, 99)] == ["chain:2", "off", "off"]


@pytest.mark.parametrize(
    "change",
    [
        {"colour": "red"},
        {"stages": []},
        {"ladder": []},
        {"devices": ["x"]},
        {"predicted": [1]},
        {"predicted": {"a": "b"}},
    ],
)
def test_damaged_plans_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="plan.json does not hold a plan"):
        plan_from_json({**OLD, **change})

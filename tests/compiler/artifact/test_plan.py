"""The plan record: its JSON form, old files, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from flexspec.compiler.artifact.plan import Plan, Stage, plan_from_json, single_rank
from flexspec.draft_plan import DraftLadder, DraftPlan
from flexspec.errors import ArtifactError

OLD: dict[str, Any] = {
    "stages": [{"first_block": 0, "end_block": 4, "ranks": [0]}],
    "ssm_ranks": [[0]],
    "ladder": [[1 << 30, "off"]],
    "origin": "default",
}


def test_plans_written_before_searches_are_read_and_written_as_they_were() -> None:
    plan = plan_from_json(OLD)
    assert plan == single_rank(4, 1, DraftPlan("off"))
    assert set(plan.to_json()) == set(OLD)


def test_a_searched_plan_comes_back() -> None:
    ladder = DraftLadder(((1, DraftPlan.parse("chain:2")), (8, DraftPlan("off"))))
    plan = Plan(
        (Stage(0, 3, (0, 1)), Stage(3, 4, (2,))), ((3,),), ladder, "search", (0, 1, 4, 7), (1, 2),
        "own", "mixed", (("period_us", 3.5),), (("gap", 0.0), ("proven", True)),
    )  # fmt: skip
    assert plan_from_json(plan.to_json()) == plan
    assert [str(plan.ladder.for_batch(batch)) for batch in (1, 2, 99)] == ["chain:2", "off", "off"]


def stage(**change: Any) -> dict[str, Any]:
    """A plan whose second stage is changed."""
    first = {"first_block": 0, "end_block": 2, "ranks": [0]}
    return {"stages": [first, {"first_block": 2, "end_block": 4, "ranks": [1], **change}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, "colour: an unknown key"),
        ({"stages": []}, "stages: []"),
        ({"stages": [3]}, "stages: [3]"),
        (stage(colour=1), "stages[1].colour: an unknown key"),
        (stage(first_block=1), "stages[1].first_block: 1; expected 2, where the stage before ends"),
        (stage(first_block=3), "stages[1].first_block: 3; expected 2"),
        (stage(end_block=2), "stages[1].end_block: 2; expected more than first_block"),
        (stage(end_block=1e9), "stages[1].end_block: 1000000000.0"),
        (stage(end_block=10**30), "stages[1].end_block: 10000"),
        (stage(end_block="4"), "stages[1].end_block: '4'"),
        (stage(ranks=[0]), "stages[1].ranks: [0]; expected at least one rank, each in one stage only"),
        (stage(ranks=[1, 1]), "stages[1].ranks: [1, 1]"),
        (stage(ranks=[]), "stages[1].ranks: []"),
        (stage(ranks=[-1]), "stages[1].ranks: [-1]"),
        (stage(ranks=[True]), "stages[1].ranks: [True]"),
        (stage(ranks=[2]), "stages: ranks [0, 2]; expected 2 ranks, from 0 to 1"),
        ({"ssm_ranks": [[0.5]]}, "ssm_ranks: [0.5]"),
        ({"ssm_ranks": [[]]}, "ssm_ranks: []"),
        ({"ssm_ranks": [0]}, "ssm_ranks: [0]"),
        ({"ladder": []}, "ladder: []"),
        ({"ladder": [[2, "off"], [1, "off"]]}, "ladder: [1, 'off'] after 2"),
        ({"ladder": [[2, "off"], [2, "off"]]}, "in ascending order"),
        ({"ladder": [[0, "off"]]}, "ladder: [0, 'off']"),
        ({"ladder": [[float("nan"), "off"]]}, "ladder: [nan, 'off']"),
        ({"ladder": [[1, 5]]}, "ladder: [1, 5]"),
        ({"ladder": [[1 << 30, "sideways:3"]]}, "draft plan 'sideways:3' for any batch: method 'sideways'"),
        ({"devices": ["x"]}, "devices: ['x']"),
        ({"devices": [0, 1]}, "devices: [0, 1]; expected one device for each of 1 ranks"),
        ({**stage(), "devices": [3, 3]}, "devices: [3, 3]"),
        ({"micro_batches": [1, 1]}, "micro_batches: [1, 1]"),
        ({"micro_batches": [0]}, "micro_batches: [0]"),
        ({"ladder": [[2, "off"]], "micro_batches": [4]}, "no larger than the batch"),
        ({"ssm_place": "middle"}, "ssm_place: 'middle'"),
        ({"ssm_place": "own"}, "ssm_place: 'own' with ssm_ranks"),
        ({"ssm_place": "none"}, "ssm_place: 'none' with ssm_ranks"),
        ({"predicted": [1]}, "predicted: [1]"),
        ({"predicted": {"a": "b"}}, "predicted.a: 'b'"),
        ({"predicted": {"a": float("inf")}}, "predicted.a: inf"),
        ({"certificate": {"gap": float("nan")}}, "certificate.gap: nan"),
        ({"certificate": {"gap": []}}, "certificate.gap: []"),
        ({"origin": ""}, "origin: ''"),
    ],
)
def test_damaged_plans_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError) as error:
        plan_from_json({**OLD, **change})
    assert f"plan.json: {message}" in str(error.value) or message in str(error.value)
    assert "compile the model again" in str(error.value)


@pytest.mark.parametrize("body", [None, [], "x", 3])
def test_what_is_no_object_is_no_plan(body: object) -> None:
    with pytest.raises(ArtifactError, match="expected a plan, an object"):
        plan_from_json(body)


def test_a_missing_key_is_named() -> None:
    for key in OLD:
        with pytest.raises(ArtifactError, match=f"plan.json: {key}: missing"):
            plan_from_json({name: value for name, value in OLD.items() if name != key})

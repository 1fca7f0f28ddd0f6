"""Predicted and measured side by side: lines add up to the round, ranks are correlated as defined, pages show all."""

from __future__ import annotations

import json

import pytest
from planning import ENTRIES, make_device, make_link, make_machine, tiny_profile, with_layers

from flexspec.compiler.artifact.plan import Stage
from flexspec.compiler.artifact.ssm_place import place_named
from flexspec.compiler.pages.compare_page import compare_json, compare_page
from flexspec.compiler.pages.predicted_lines import ALL, Outcome, Trial, predicted_lines, spearman, worst_ratio
from flexspec.compiler.prices.acceptance_profile import OFF, DraftEntry
from flexspec.compiler.prices.machine import NodeKind
from flexspec.compiler.prices.problem import Problem
from flexspec.compiler.prices.rounds import Cut, Prices, round_cost

LAYOUTS = {
    "one": ((4, 1),),
    "pipeline": ((1, 1), (3, 1)),
    "parallel": ((4, 2),),
    "mixed": ((1, 2), (2, 1), (1, 2)),
}


def problem() -> Problem:
    kind = NodeKind(make_device(), 4, make_link(), 2)
    llm, ssm = with_layers(tiny_profile("mha"), 4), tiny_profile("ssm", ssm=True)
    return Problem(make_machine(kind), llm, (ssm, ssm), ENTRIES, 4, 64, degrees=(1, 2))


def trial(name: str = "one", entry: DraftEntry = OFF, batch: int = 1) -> Trial:
    """Stages of a layout; the second node begins at stage 2."""
    stages, cuts = [], []
    for number, (blocks, degree) in enumerate(LAYOUTS[name]):
        first, ranks = (stages[-1].end_block, stages[-1].ranks[-1] + 1) if stages else (0, 0)
        stages.append(Stage(first, first + blocks, tuple(range(ranks, ranks + degree))))
        cuts.append(Cut(0, degree, blocks, number == 2))
    place = place_named("first" if entry.levels else "none")
    return Trial(f"{name}; {entry.draft}", tuple(stages), tuple(cuts), place, entry, batch)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("entry", [OFF, *ENTRIES], ids=lambda entry: str(entry.draft))
@pytest.mark.parametrize("name", LAYOUTS)
def test_lines_are_the_round(name: str, entry: DraftEntry, batch: int) -> None:
    asked, each = problem(), trial(name, entry, batch)
    lines = predicted_lines(asked, each)
    cost = round_cost(Prices(asked, each.place, entry, batch), each.cuts)
    assert sum(lines.values()) == pytest.approx(cost.latency_us)
    parts = {part for part, _ in lines}
    assert {part for part in parts if part.startswith("hop")} == {f"hop {i}-{i + 1}" for i in range(len(each.cuts) - 1)}
    assert ("draft" in parts) == bool(entry.levels)
    assert ("stage 0", "reduce") in lines or each.cuts[0].degree == 1


def test_spearman_by_hand() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 1e9]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # 1 - 6 * sum(d^2) / (n (n^2 - 1)) without ties: ranks differ by 0, 1, 1, 0
    assert spearman([1, 2, 3, 4], [5, 7, 6, 8]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    # ties share their mean rank: x has ranks 1, 2.5, 2.5, 4; Pearson of those with 1, 2, 3, 4
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([5, 5, 5], [1, 2, 3]) == 0.0


def outcomes() -> list[Outcome]:
    first = {("stage 0", "linear"): 100.0, ("stage 0", "rope"): 0.2, ("host", ALL): 50.0}
    measured = {("stage 0", "linear"): 150.0, ("stage 0", "rope"): 0.3, ("host", ALL): 100.0}
    measured["stage 0", "hand over"] = 49.7
    second = {**first, ("hop 0-1", ALL): 10.0, ("stage 1", "linear"): 40.0, ("messages", ALL): 5.0}
    return [
        Outcome(trial(), first, measured, 7),
        Outcome(trial("pipeline", ENTRIES[0], 2), second, {**second, ("draft", "linear"): 205.2}, 7),
    ]


def test_outcomes_add_up_in_the_order_of_a_round() -> None:
    first, second = outcomes()
    assert first.predicted_us == pytest.approx(150.2) and first.measured_us == pytest.approx(300.0)
    assert second.parts() == ["draft", "stage 0", "hop 0-1", "stage 1", "messages", "host"]
    sums = [row for row in second.rows() if row[1] == ALL]
    assert sum(row[2] for row in sums) == pytest.approx(second.predicted_us)
    assert sum(row[3] for row in sums) == pytest.approx(second.measured_us)
    assert worst_ratio([first]) == pytest.approx(300 / 150.2)
    assert worst_ratio([first, second]) == pytest.approx((205.2 + 205.2) / 205.2)


def test_page_and_json_show_every_plan() -> None:
    both = outcomes()
    page, body = compare_page(both, "made up"), compare_json(both)
    assert "rank correlation (Spearman) 1.000, worst ratio 2.00" in page
    assert "hand over" in page and "rope" not in page  # a fraction of a microsecond is left out
    plan = json.loads(json.dumps(body))["plans"][1]
    assert (plan["draft"], plan["batch"], plan["rows"], plan["ssm"]) == ("chain:3", 2, 8, "first")
    assert plan["stages"] == [[0, 1, [0]], [1, 4, [1]]]
    line = next(line for line in plan["lines"] if line["part"] == "draft" and line["what"] == "linear")
    assert line["ratio"] == 0.0 and line["measured_us"] == 205.2

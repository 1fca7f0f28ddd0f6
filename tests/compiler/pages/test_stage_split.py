"""Where a stage's time goes: the parts are the stage's time as the search priced it, whatever the plan."""

from __future__ import annotations

import pytest
from planning import random_problem

from flexspec.compiler.pages.stage_split import stage_splits
from flexspec.compiler.planner.plan_choice import uniform_plans
from flexspec.compiler.prices.rounds import Prices, round_cost


@pytest.mark.parametrize("seed", range(12))
def test_parts_add_up_to_the_stage(seed: int) -> None:
    problem = random_problem(seed)
    for plan in uniform_plans(problem):
        prices = Prices(problem, plan.place, plan.entry, plan.micro)
        cost = round_cost(prices, plan.cuts)
        splits = stage_splits(prices, cost, plan.cuts)
        assert [split.total_us for split in splits] == pytest.approx(
            [stage.stage_us for stage in cost.stages], rel=1e-9
        )
        for cut, each in zip(plan.cuts, splits, strict=True):
            assert each.operators_us > 0 and (each.collectives_us > 0) == (cut.degree > 1)
            assert each.rows == plan.entry.rows(plan.micro)

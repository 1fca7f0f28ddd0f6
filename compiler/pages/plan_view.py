"""What the page, the JSON and the picture of a plan show: prices and bytes of its parts, each computed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flexspec.compiler.pages.stage_split import StageSplit, stage_splits
from flexspec.compiler.planner.plan_choice import Layout, drafting_bytes, plan_bytes
from flexspec.compiler.planner.search import Candidate
from flexspec.compiler.prices.memory import RankBytes
from flexspec.compiler.prices.problem import Problem
from flexspec.compiler.prices.rounds import Prices, RoundCost, round_cost

_MIN_SHOWN_US = 0.0005


@dataclass(frozen=True)
class PlanView:
    """A plan on the devices of its layout."""

    problem: Problem
    plan: Candidate
    layout: Layout

    @cached_property
    def _prices(self) -> Prices:
        return Prices(self.problem, self.plan.place, self.plan.entry, self.plan.micro)

    @cached_property
    def cost(self) -> RoundCost:
        """The round of one micro-batch."""
        return round_cost(self._prices, self.plan.cuts)

    @cached_property
    def splits(self) -> list[StageSplit]:
        """What the time of each stage is made of."""
        return stage_splits(self._prices, self.cost, self.plan.cuts)

    @cached_property
    def stage_bytes(self) -> list[RankBytes]:
        """Memory of the largest rank of each stage, including its SSMs."""
        return plan_bytes(self.problem, self.plan.place, self.plan.cuts)

    @cached_property
    def drafting_bytes(self) -> dict[int, RankBytes]:
        """Memory that SSMs take on each device that drafts."""
        return drafting_bytes(self.problem, self.plan.place, self.layout)

    @cached_property
    def stage_of_device(self) -> dict[int, int]:
        return {device: stage for stage, devices in enumerate(self.layout.stages) for device in devices}

    @cached_property
    def timeline(self) -> list[tuple[str, float]]:
        """The parts of a micro-batch's round, in order, with their microseconds."""
        cost = self.cost
        parts = [("draft", cost.drafting_us)]
        for i, stage in enumerate(cost.stages):
            parts += [(f"hop to stage {i}", cost.hops_us[i - 1])] if i else []
            parts.append((f"verify, stage {i}", stage.verify_us))
        parts.append(("ids out and back", cost.messages_us))
        parts.append(("accept, commit (host)", cost.host_us))
        return [(name, us) for name, us in parts if us > _MIN_SHOWN_US]

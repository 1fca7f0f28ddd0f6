"""All drafters of a plan as one: draft with each, merge, calibrate, and keep what the plan and the costs allow.

Owns the order of these steps and nothing else. The engine drives it like any drafter, in two halves where SSMs draft on
other ranks, and reports each verify through ``record``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexspec.draft_plan import DraftLadder, DraftPlan, WorstCase, worst_case
from flexspec.runtime.drafters.base import DistantDrafter, Drafter, DraftRequest, ModelDrafter
from flexspec.runtime.drafters.budget import SMOOTHING, StepCost, choose_budget
from flexspec.runtime.drafters.calibrate import Calibration
from flexspec.runtime.drafters.merge import best_chain, merge_trees, most_promising, path_survival, take_nodes
from flexspec.runtime.drafters.worth import StepWorth
from flexspec.tree import TokenTree

_HEADROOM = 1.5  # requested over usual nodes: a source that has more can show it, and the usual count grows
_SPARE_NODES = 2


@dataclass(frozen=True, slots=True)
class _Sources:
    """What a plan drafts with."""

    model_free: list[Drafter]
    local: list[ModelDrafter]  # SSMs of this process
    distant: list[DistantDrafter]  # SSMs on other ranks
    limits: WorstCase  # the most it may draft

    @classmethod
    def of(cls, plan: DraftPlan, drafters: Sequence[Drafter]) -> _Sources:
        models = [drafter for drafter in drafters if isinstance(drafter, ModelDrafter)]
        distant = [model for model in models if isinstance(model, DistantDrafter)]
        model_free = [drafter for drafter in drafters if not isinstance(drafter, ModelDrafter)]
        return cls(model_free, [model for model in models if model not in distant], distant, worst_case(plan))


@dataclass(slots=True)
class Draft:
    """A draft in progress."""

    plan: DraftPlan
    sources: _Sources
    requests: list[DraftRequest]  # limited to the plan
    merged: list[TokenTree] | None = None  # from the sources that have finished
    running: list[DistantDrafter] = field(default_factory=list)  # on other ranks


class PlannedDrafter:
    """The ladder's drafters, by name; each round uses the plan of its batch size, in the plan's order.

    ``step_cost`` is the LLM's measured cost by rows; without it method "budget" always takes ``max_nodes``.
    ``draft_cost`` is the measured cost of a round's drafting in the same unit, see ``record_cost``.
    Where costs keep trees small, the sources are asked for little more than was last verified: the cost of drafting for
    many requests at once is then in proportion to its gain. With method "budget" and measured costs each step of an SSM
    runs only where it is worth its time (worth.py).
    """

    name = "planned"

    def __init__(
        self, ladder: DraftLadder, drafters: Sequence[Drafter], step_cost: StepCost | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        by_name = {drafter.name: drafter for drafter in drafters}
        assert set(ladder.sources) <= set(by_name), f"the plan wants {ladder.sources}, there are {sorted(by_name)}"
        self.ladder = ladder
        self.calibration = Calibration()
        self.step_cost = step_cost
        self.draft_cost = 0.0
        self.limits, self.drafts = ladder.worst, ladder.drafts
        self._usual_nodes = float(self.limits.max_nodes)  # verified nodes per request, smoothed
        self._drafters = [by_name[source] for source in ladder.sources]
        self._sources = {
            plan: _Sources.of(plan, [by_name[source] for source in plan.sources if plan.method != "off"])
            for plan in ladder.plans
        }
        self.reads_features = any(drafter.reads_features for drafter in self._drafters)
        self._clock = clock
        self.models = [drafter for drafter in self._drafters if isinstance(drafter, ModelDrafter)]
        # requests -> start of their last round, tokens committed by then
        self._rounds: dict[tuple[int, ...], tuple[float, int]] = {}
        self._tokens = 0  # committed so far

    def begin(self, request_id: int, prompt_ids: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.begin(request_id, prompt_ids)

    def observe_prompt(self, request_id: int, start: int, features_KE: NDArray[np.float32] | None) -> None:
        for drafter in self._drafters:
            drafter.observe_prompt(request_id, start, features_KE)

    def observe(self, request_id: int, committed: Sequence[int], features_KE: NDArray[np.float32] | None) -> None:
        self._tokens += len(committed)
        for drafter in self._drafters:
            drafter.observe(request_id, committed, features_KE)

    def end(self, request_id: int) -> None:
        self._forget([request_id])
        for drafter in self._drafters:
            drafter.end(request_id)

    def record(self, tree: TokenTree, accepted_nodes: Collection[int]) -> None:
        """Learn from one verified tree (as ``propose`` gave it) and the nodes of its accepted path."""
        self.calibration.update(tree, accepted_nodes)
        for model in self.models:
            if model.worth is not None:
                model.worth.accepted(tree, accepted_nodes)

    def record_cost(self, cost: float) -> None:
        """The cost of one round's drafting, in LLM steps of one row."""
        self.draft_cost += SMOOTHING * (cost - self.draft_cost)

    def propose(self, requests: Sequence[DraftRequest], batch: int | None = None) -> list[TokenTree]:
        return self.finish(self.start(requests, batch))

    def start(self, requests: Sequence[DraftRequest], batch: int | None = None) -> Draft:
        """Begin a draft: run the model-free sources, start SSMs on other ranks. ``batch``: all running requests."""
        plan = self.ladder.for_batch(len(requests) if batch is None else batch)
        sources = self._sources[plan]
        if plan.method == "off" or not requests:
            return Draft(plan, sources, list(requests))
        self._begin_round(plan, requests)
        draft = Draft(plan, sources, [self._limit(sources.limits, request) for request in requests])
        draft.merged = self._merge([drafter.propose(draft.requests) for drafter in sources.model_free]) or None
        draft.running = [model for model in sources.distant if self._pays(model, draft)]
        for model in draft.running:
            model.use(plan)
            model.start(draft.requests)
        return draft

    def finish(self, draft: Draft) -> list[TokenTree]:
        """The trees of a draft, one per request in order. Drafts end in the order in which they began."""
        plan, requests = draft.plan, draft.requests
        if plan.method == "off" or not requests:
            return [TokenTree.root_only(request.last_token) for request in requests]
        for model in draft.sources.local:
            if self._pays(model, draft):
                model.use(plan)
                self._add(draft, model.propose(requests))
        for distant in draft.running:
            self._add(draft, distant.finish())
        merged = draft.merged or [TokenTree.root_only(request.last_token) for request in requests]
        survival = [path_survival(tree, self.calibration.scores(tree)) for tree in merged]
        selected = [self._select(plan, *item) for item in zip(requests, merged, survival, strict=True)]
        if plan.method == "budget" and self.step_cost is not None:
            chances = [[chance[i] for i in nodes] for chance, nodes in zip(survival, selected, strict=True)]
            budget = choose_budget(chances, self.step_cost, self.draft_cost)
            selected = [nodes[:count] for nodes, count in zip(selected, budget.nodes, strict=True)]
            self._usual_nodes += SMOOTHING * (max(budget.nodes) - self._usual_nodes)
        return [take_nodes(tree, nodes) for tree, nodes in zip(merged, selected, strict=True)]

    def _pays(self, model: ModelDrafter, draft: Draft) -> bool:
        """Whether to run a model at all: always if nothing else drafts, else if its first level pays."""
        if draft.merged is None or model.worth is None:
            return True
        return model.worth.ask(0, sum(self._miss(tree) for tree in draft.merged))

    def _add(self, draft: Draft, trees: Sequence[TokenTree]) -> None:
        draft.merged = self._merge([draft.merged, trees]) if draft.merged else list(trees)

    def _begin_round(self, plan: DraftPlan, requests: Sequence[DraftRequest]) -> None:
        """Close these requests' previous round: its time, and all tokens committed since it began."""
        if plan.method != "budget" or self.step_cost is None:
            return
        now, ids = self._clock(), tuple(request.request_id for request in requests)
        before, tokens = self._rounds.get(ids, (None, self._tokens))
        self._forget(ids)
        for model in self.models:
            model.worth = model.worth or StepWorth(model.name, by_level=not isinstance(model, DistantDrafter))
            model.worth.begin_round(self._tokens - tokens, None if before is None else now - before)
        self._rounds[ids] = (now, self._tokens)

    def _forget(self, ids: Sequence[int]) -> None:
        """Drop the rounds of any of these requests: they are over, or their batch changes."""
        self._rounds = {batch: at for batch, at in self._rounds.items() if not set(ids) & set(batch)}

    @staticmethod
    def _merge(drafts: Sequence[Sequence[TokenTree]]) -> list[TokenTree]:
        return [merge_trees(trees) for trees in zip(*drafts, strict=True)]

    def _miss(self, tree: TokenTree) -> float:
        """The chance that none of the root's children is the next token."""
        hit = sum([
            self.calibration.score(tree.sources[i], 1, tree.scores[i])
            for i in range(1, len(tree)) if tree.parents[i] == 0
        ])  # fmt: skip
        return max(0.0, 1.0 - hit)

    def _limit(self, limits: WorstCase, request: DraftRequest) -> DraftRequest:
        usual = int(_HEADROOM * self._usual_nodes) + _SPARE_NODES
        nodes, depth = min(request.max_nodes, limits.max_nodes, usual), min(request.max_depth, limits.max_depth)
        return DraftRequest(request.request_id, request.last_token, nodes, depth, request.params, request.seed)

    def _select(self, plan: DraftPlan, request: DraftRequest, tree: TokenTree, survival: Sequence[float]) -> list[int]:
        """Drafted nodes within the request's limits, best first."""
        if tree.laws:  # sized before it was drawn; cutting it now would depend on what was drawn
            return list(range(1, len(tree)))
        if plan.method == "chain":
            return best_chain(tree, survival, min(request.max_depth, request.max_nodes))
        return most_promising(tree, survival, request.max_nodes, request.max_depth)

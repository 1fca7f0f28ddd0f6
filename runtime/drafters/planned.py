"""All drafters of a plan behind one: draft with each, merge, calibrate, and keep what the plan and the costs allow.

Owns the order of these steps and nothing else. The engine drives it like any drafter and reports each verify through
``record``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from flexspec.runtime.drafters.base import Drafter, DraftRequest, ModelDrafter
from flexspec.runtime.drafters.budget import StepCost, choose_budget
from flexspec.runtime.drafters.calibrate import Calibration
from flexspec.runtime.drafters.merge import best_chain, merge_trees, most_promising, path_survival, take_nodes
from flexspec.runtime.drafters.plan import DraftPlan, worst_case
from flexspec.runtime.drafters.worth import StepWorth
from flexspec.tree import TokenTree

_SMOOTHING = 0.1
_HEADROOM = 1.5  # asked over usual: a source that could give more shows it, and the usual count grows
_SPARE_NODES = 2


class PlannedDrafter:
    """The plan's drafters, in the order of ``plan.sources`` (their names).

    ``step_cost`` is the LLM's measured cost by rows; without it method "budget" always takes ``max_nodes``.
    ``draft_cost`` is the measured cost of a round's drafting in the same unit; the engine may update it at any time.
    Where costs keep trees small, the sources are asked for little more than what was last verified: drafting for many
    requests at once then costs in proportion to what it gives. With method "budget" and measured costs each step of an
    SSM runs only where it is worth its time (worth.py).
    """

    name = "planned"

    def __init__(
        self, plan: DraftPlan, drafters: Sequence[Drafter], step_cost: StepCost | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        by_name = {drafter.name: drafter for drafter in drafters}
        sources = plan.sources if plan.method != "off" else ()
        assert set(sources) <= set(by_name), f"the plan wants {sources}, there are {sorted(by_name)}"
        self.plan = plan
        self.calibration = Calibration()
        self.step_cost = step_cost
        self.draft_cost = 0.0
        self.limits = worst_case(plan)
        self._usual_nodes = float(self.limits.max_nodes)  # verified nodes a request, smoothed
        self._drafters = [by_name[source] for source in sources]
        self.reads_features = any(drafter.reads_features for drafter in self._drafters)
        self._clock = clock
        self.models = [drafter for drafter in self._drafters if isinstance(drafter, ModelDrafter)]
        self._others = [drafter for drafter in self._drafters if not isinstance(drafter, ModelDrafter)]
        self._last_round: tuple[list[int], float] | None = None  # its requests, and when it began
        self._tokens = 0  # committed since then

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
        for drafter in self._drafters:
            drafter.end(request_id)

    def record(self, tree: TokenTree, accepted_nodes: Collection[int]) -> None:
        """Learn from one verified tree (as ``propose`` gave it) and the nodes of its accepted path."""
        self.calibration.update(tree, accepted_nodes)
        for model in self.models:
            if model.worth is not None:
                model.worth.accepted(tree, accepted_nodes)

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        if not self._drafters or not requests:
            return [TokenTree.root_only(request.last_token) for request in requests]
        self._begin_round(requests)
        limited = [self._limit(request) for request in requests]
        merged = self._merge([drafter.propose(limited) for drafter in self._others])
        for model in self.models:
            if not merged:
                merged = model.propose(limited)
            elif model.worth is None or model.worth.ask(0, sum(self._miss(tree) for tree in merged)):
                merged = self._merge([merged, model.propose(limited)])
        survival = [path_survival(tree, self.calibration.scores(tree)) for tree in merged]
        kept = [self._keep(*item) for item in zip(limited, merged, survival, strict=True)]
        if self.plan.method == "budget" and self.step_cost is not None:
            chances = [[chance[i] for i in nodes] for chance, nodes in zip(survival, kept, strict=True)]
            budget = choose_budget(chances, self.step_cost, self.draft_cost)
            kept = [nodes[:count] for nodes, count in zip(kept, budget.nodes, strict=True)]
            self._usual_nodes += _SMOOTHING * (max(budget.nodes) - self._usual_nodes)
        return [take_nodes(tree, nodes) for tree, nodes in zip(merged, kept, strict=True)]

    def _begin_round(self, requests: Sequence[DraftRequest]) -> None:
        """Close the books of the round before. It is timed when this one has the same requests."""
        if self.plan.method != "budget" or self.step_cost is None:
            return
        now, ids = self._clock(), [request.request_id for request in requests]
        same = self._last_round is not None and self._last_round[0] == ids
        seconds = now - self._last_round[1] if same and self._last_round is not None else None
        for model in self.models:
            model.worth = model.worth or StepWorth(model.name)
            model.worth.begin_round(self._tokens, seconds)
        self._last_round, self._tokens = (ids, now), 0

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

    def _limit(self, request: DraftRequest) -> DraftRequest:
        usual = int(_HEADROOM * self._usual_nodes) + _SPARE_NODES
        nodes, depth = (
            min(request.max_nodes, self.limits.max_nodes, usual),
            min(request.max_depth, self.limits.max_depth),
        )
        return DraftRequest(request.request_id, request.last_token, nodes, depth, request.params)

    def _keep(self, request: DraftRequest, tree: TokenTree, survival: Sequence[float]) -> list[int]:
        """Drafted nodes within the request's limits, best first."""
        if tree.laws:  # sized before it was drawn; cutting it now would depend on what was drawn
            return list(range(1, len(tree)))
        if self.plan.method == "chain":
            return best_chain(tree, survival, min(request.max_depth, request.max_nodes))
        return most_promising(tree, survival, request.max_nodes, request.max_depth)

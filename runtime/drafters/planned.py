"""All drafters of a plan behind one: draft with each, merge, calibrate, and keep what the plan and the costs allow.

Owns the order of these steps and nothing else. The engine drives it like any drafter and reports each verify through
``record``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from flexspec.runtime.drafters.base import Drafter, DraftRequest
from flexspec.runtime.drafters.budget import StepCost, choose_budget
from flexspec.runtime.drafters.calibrate import Calibration
from flexspec.runtime.drafters.merge import best_chain, merge_trees, most_promising, path_survival, take_nodes
from flexspec.runtime.drafters.plan import DraftPlan, worst_case
from flexspec.runtime.drafters.source_choice import SourceChoice
from flexspec.tree import TokenTree

_SMOOTHING = 0.1
_HEADROOM = 1.5  # asked over usual: a source that could give more shows it, and the usual count grows
_SPARE_NODES = 2


class PlannedDrafter:
    """The plan's drafters, in the order of ``plan.sources`` (their names).

    ``step_cost`` is the LLM's measured cost by rows; without it method "budget" always takes ``max_nodes``.
    ``draft_cost`` is the measured cost of a round's drafting in the same unit; the engine may update it at any time.
    Where costs keep trees small, the sources are asked for little more than what was last verified: drafting for many
    requests at once then costs in proportion to what it gives. With method "budget", measured costs and a source beside
    the SSMs, the SSMs are asked only while that makes tokens come faster (source_choice.py).
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
        self.choice = SourceChoice()
        self._clock = clock
        self._models = {source for source in sources if source.startswith("ssm")}
        self._may_choose = plan.method == "budget" and 0 < len(self._models) < len(sources)
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

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        if not self._drafters or not requests:
            return [TokenTree.root_only(request.last_token) for request in requests]
        limited = [self._limit(request) for request in requests]
        drafts = [drafter.propose(limited) for drafter in self._asked(requests)]
        merged = [merge_trees([trees[i] for trees in drafts]) for i in range(len(requests))]
        survival = [path_survival(tree, self.calibration.scores(tree)) for tree in merged]
        kept = [self._keep(*item) for item in zip(limited, merged, survival, strict=True)]
        if self.plan.method == "budget" and self.step_cost is not None:
            chances = [[chance[i] for i in nodes] for chance, nodes in zip(survival, kept, strict=True)]
            budget = choose_budget(chances, self.step_cost, self.draft_cost)
            kept = [nodes[:count] for nodes, count in zip(kept, budget.nodes, strict=True)]
            self._usual_nodes += _SMOOTHING * (max(budget.nodes) - self._usual_nodes)
        return [take_nodes(tree, nodes) for tree, nodes in zip(merged, kept, strict=True)]

    def _asked(self, requests: Sequence[DraftRequest]) -> list[Drafter]:
        """The sources of this round. A round is timed when the next one has the same requests."""
        if not self._may_choose or self.step_cost is None:
            return self._drafters
        now, ids = self._clock(), [request.request_id for request in requests]
        if self._last_round is not None and self._last_round[0] == ids:
            self.choice.record(self._tokens, now - self._last_round[1])
        self._last_round, self._tokens = (ids, now), 0
        return [d for d in self._drafters if self.choice.with_models or d.name not in self._models]

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

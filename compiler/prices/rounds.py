"""The objective: microseconds of a speculation round over the tokens it brings, for any plan.

A round of a micro-batch is: SSM steps (wishes sent to other ranks and trees sent back, where SSMs live there), the
verify pass through all stages and hops, the return of its results to rank 0, accepting there. With M micro-batches in
flight a batch comes round every max(latency, M * bottleneck), where the bottleneck is the busiest stage (the first one
has the host's work too), hop or SSM device. M = 1 is the plain latency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

from flexspec.compiler.prices.acceptance_profile import DraftEntry
from flexspec.compiler.prices.cost import broadcast_us, hop_us, unit_us
from flexspec.compiler.prices.machine import Link, NodeKind
from flexspec.compiler.prices.problem import Problem, SsmPlace
from flexspec.compiler.prices.profile import ModelProfile, Sizes, step_sizes

_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Cut:
    """A stage: ``blocks`` blocks on ``degree`` devices of machine kind ``kind``; ``new_node``: not that before it."""

    kind: int
    degree: int
    blocks: int
    new_node: bool


@dataclass(frozen=True, slots=True)
class Beside:
    """Microseconds of a stage in a round beside its operators and collectives; 0 for what the stage has not.

    ``hand_over_us``: giving the step to the program. ``told_us``: the step plan to the stage's other ranks, and
    ``telling_us`` the host's work for that. ``host_us``: one thread of rank 0 runs the first stage's steps, and accepts
    what comes back. ``draft_us``: SSMs that live there. ``returned_us``: messages from the last stage to rank 0.
    """

    hand_over_us: float
    told_us: float
    telling_us: float
    host_us: float
    draft_us: float
    returned_us: float

    @property
    def total_us(self) -> float:
        return float(sum(astuple(self)))


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Microseconds of one micro-batch's round; ``stages_us`` hold drafting where SSMs live with a stage.

    ``bottleneck_us``: of the part that is busy longest; the first stage and the host's work are one.
    """

    draft_us: float  # before the first stage; 0 where it is part of a stage
    stages_us: tuple[float, ...]
    hops_us: tuple[float, ...]
    return_us: float
    host_us: float
    latency_us: float
    bottleneck_us: float

    def period_us(self, micro_batches: int) -> float:
        return max(self.latency_us, micro_batches * self.bottleneck_us)


class Prices:
    """All prices of a round with one draft plan, one SSM place and ``requests`` requests in the micro-batch."""

    def __init__(self, problem: Problem, place: SsmPlace, entry: DraftEntry, requests: int) -> None:
        self.problem, self.place, self.entry, self.requests = problem, place, entry, requests
        machine = problem.machine
        self.rows = entry.rows(requests)
        self.sizes = step_sizes(self.rows, requests, problem.context_tokens)
        self.hidden_bytes = self.rows * problem.llm.hidden_bytes
        self.step_us = machine.step_us.effective
        # A hop carries the states that an SSM reads of earlier layers too: as many as do where a cut falls anywhere.
        taps = max((ssm.taps for ssm in problem.ssms), key=len, default=()) if place.name != "none" else ()
        self.crossing = 1.0 + sum(max(0.0, 1.0 - tap / problem.llm.blocks) for tap in taps)
        self.host_us = machine.round_us.effective + requests * machine.request_us.effective
        far = machine.network or machine.kinds[0].link
        self.ids_us = far.transfer_us(self.rows * _ID_BYTES) if machine.devices > 1 else 0.0
        name = place.name
        self.returned_us = self._results_us(far)
        self.returned_us += self._asking_us(far) if name == "last" else 0.0
        self.each_us = 0.0  # what every stage does beside its blocks, in a full pipeline
        self.own_us = 0.0  # drafting before the first stage
        if name == "own":
            self.own_us = self.draft_us(machine.kinds[place.kind], requests, together=False)
        if name == "all":
            share = -(-requests // machine.devices)
            self.own_us = max(self.draft_us(kind, share, together=True) for kind in machine.kinds)
            self.each_us = self.own_us
        asking_us = self._asking_us(far) if name in ("own", "all") else 0.0
        self.fixed_us = self.own_us + asking_us
        self.fixed_bottleneck_us = self.own_us

    def unit_us(self, kind: int, degree: int, unit: str) -> float:
        """Time of the LLM's front, block or back on a stage."""
        return _llm_unit_us(self.problem.llm, self.problem.kind(kind), degree, unit, tuple(self.sizes.items()))

    def draft_us(self, kind: NodeKind, requests: int, *, together: bool) -> float:
        """SSM steps for ``requests`` requests on one device; ``together``: all SSMs on it, one after the other."""
        context, between = self.problem.context_tokens, self.between_us(requests)
        times = [ssm_us(ssm, kind, self.entry, requests, context) + between for ssm in self.problem.ssms]
        return sum(times) if together else max(times, default=0.0)

    def between_us(self, requests: int) -> float:
        """The host's work for one SSM's steps: handing each over, and growing the requests' trees."""
        each = self.step_us + requests * self.problem.machine.step_request_us.effective
        return len(self.entry.ssm_rows) * each

    def stage_us(self, kind: int, degree: int, blocks: int, *, first: bool, last: bool) -> float:
        """Time that a stage is busy in a round, the ends of ``ends_us`` among it."""
        return blocks * self.unit_us(kind, degree, "block") + self.ends_us(kind, degree, first=first, last=last)

    def ends_us(self, kind: int, degree: int, *, first: bool, last: bool) -> float:
        """What a stage does beside its blocks: embedding, LM head, and what is not the model's."""
        front = self.unit_us(kind, degree, "front") if first else 0.0
        back = self.unit_us(kind, degree, "back") if last else 0.0
        return front + back + self.beside(kind, degree, first=first, last=last).total_us

    def beside(self, kind: int, degree: int, *, first: bool, last: bool) -> Beside:
        """What of a stage's time is not the model's."""
        node = self.problem.kind(kind)
        drafts = (self.place.name == "first" and first) or (self.place.name == "last" and last)
        return Beside(
            hand_over_us=self.step_us,
            told_us=broadcast_us(node.link, self.rows * _ID_BYTES, degree) if first else 0.0,
            telling_us=self.step_us if first and not (last and degree == 1) else 0.0,  # as much as handing one over
            host_us=self.host_us if first else 0.0,
            draft_us=self.draft_us(node, self.requests, together=True) if drafts else 0.0,
            returned_us=self.returned_us if last and not first else 0.0,
        )

    def _asking_us(self, far: Link) -> float:
        """Drafting on another rank than 0: a message with wishes and what was committed, and one back with trees."""
        if not self.entry.levels or self.problem.machine.devices == 1:
            return 0.0
        committed = self._feature_bytes(far, self.requests * self.entry.committed_tokens)
        return self.ids_us + far.transfer_us(self.rows * _ID_BYTES + committed)

    def _results_us(self, far: Link) -> float:
        """Chosen ids to rank 0, and what SSMs read of the LLM's states: wherever they live, it goes by rank 0."""
        features = self._feature_bytes(far, self.rows)
        return self.ids_us + (far.transfer_us(features) if features and self.problem.machine.devices > 1 else 0.0)

    def _feature_bytes(self, far: Link, rows: float) -> float:
        columns = max((ssm.reads_features for ssm in self.problem.ssms), default=0) if self.entry.levels else 0
        dtype = self.problem.llm.dtype
        return far.sent_bytes(rows * columns * dtype.size_bytes, dtype)

    def hop_us(self, kind: int, source: int, target: int, *, new_node: bool) -> float:
        """From a stage of ``source`` ranks to one of ``target`` on a node of ``kind``."""
        inside = self.problem.kind(kind).link
        between = self.problem.machine.network if new_node else inside
        assert between is not None
        sent_bytes = between.sent_bytes(self.hidden_bytes, self.problem.llm.dtype)
        return self.crossing * hop_us(between, inside, sent_bytes, source, target, shared=new_node)


def round_cost(prices: Prices, cuts: Sequence[Cut]) -> RoundCost:
    """The round of a plan whose stages are ``cuts``."""
    final = len(cuts) - 1
    busy = [
        prices.stage_us(cut.kind, cut.degree, cut.blocks, first=i == 0, last=i == final) for i, cut in enumerate(cuts)
    ]
    hops = tuple(
        prices.hop_us(cut.kind, before.degree, cut.degree, new_node=cut.new_node)
        for before, cut in zip(cuts, cuts[1:], strict=False)
    )
    latency = prices.fixed_us + sum(busy) + sum(hops)
    busiest = max(busy) + prices.each_us
    stages = (busy[0] - prices.host_us, *busy[1:])
    bottleneck = max(prices.fixed_bottleneck_us, busiest, *hops) if hops else max(prices.fixed_bottleneck_us, busiest)
    returned = prices.returned_us if len(cuts) > 1 else 0.0
    return RoundCost(prices.own_us, stages, hops, returned, prices.host_us, latency, bottleneck)


def value_us(problem: Problem, entry: DraftEntry, batch: int, period_us: float) -> float:
    """What is minimised: us per token of a request (latency), or of all requests together; inf beyond the limit."""
    per_request = period_us / entry.committed_tokens
    if problem.objective == "latency":
        return per_request
    if problem.objective == "goodput" and per_request > problem.limit_us:
        return math.inf
    return per_request / batch


def micro_batch_counts(batch: int) -> list[int]:
    """Numbers of micro-batches to try: powers of two up to the batch, 16 at most."""
    return [count for count in (1, 2, 4, 8, 16) if count <= batch]


@lru_cache(maxsize=1 << 16)
def _llm_unit_us(
    llm: ModelProfile, kind: NodeKind, degree: int, unit: str, sizes: tuple[tuple[str, int], ...]
) -> float:
    calls = llm.ranks[degree].calls[unit]
    return unit_us(kind.device, kind.link, llm.dtype, calls, dict(sizes), degree)


@lru_cache(maxsize=1 << 14)
def ssm_us(ssm: ModelProfile, kind: NodeKind, entry: DraftEntry, requests: int, context_tokens: int) -> float:
    """All steps of one SSM in a round."""
    return sum(model_us(ssm, kind, sizes) for sizes in ssm_sizes(entry, requests, context_tokens))


def ssm_sizes(entry: DraftEntry, requests: int, context_tokens: int) -> list[Sizes]:
    """The letters of each SSM step of a round."""
    rows = [max(requests, math.ceil(requests * each - 1e-9)) for each in entry.ssm_rows]
    return [step_sizes(each, requests, context_tokens) for each in rows]


def model_us(model: ModelProfile, kind: NodeKind, sizes: Sizes) -> float:
    """A step of a whole model on one device."""
    calls = model.ranks[1].calls
    times = {unit: unit_us(kind.device, kind.link, model.dtype, part, sizes, 1) for unit, part in calls.items()}
    return times["front"] + model.blocks * times["block"] + times["back"]

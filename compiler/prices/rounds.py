"""The objective: microseconds of a speculation round per token that it commits, for any plan.

A round of a micro-batch consists of the SSM steps (with draft requests and trees exchanged, where SSMs live on other
ranks), the verify pass through all stages and hops, the return of its results to rank 0, and acceptance there. With M
micro-batches in flight, the period of a batch is max(latency, M * bottleneck). The bottleneck is the busiest stage
(the first one includes the host's work), hop or SSM device. If M = 1, the period is the latency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from flexspec.compiler.artifact.ssm_place import SsmPlace
from flexspec.compiler.prices.acceptance_profile import DraftEntry
from flexspec.compiler.prices.cost import broadcast_us, hop_us, unit_us
from flexspec.compiler.prices.machine import Link, NodeKind
from flexspec.compiler.prices.problem import Choice, Problem
from flexspec.compiler.prices.profile import ModelProfile, Sizes, step_sizes

_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Cut:
    """A stage as the search sees it."""

    kind: int  # index of the machine's kind of nodes
    degree: int  # devices
    blocks: int
    new_node: bool  # on another node than the stage before it


@dataclass(frozen=True, slots=True)
class StageExtras:
    """What a stage spends in a round besides its operators and collectives; 0 where a part does not apply."""

    hand_over_us: float  # passing the step to the program
    broadcast_us: float  # sending the step plan to the stage's other ranks
    broadcast_host_us: float  # the host's work for that broadcast
    host_us: float  # rank 0's acceptance: the thread that runs the first stage's steps does it
    draft_us: float  # steps of SSMs that live with the stage
    returned_us: float  # messages from the last stage to rank 0

    @property
    def total_us(self) -> float:
        before_us = self.hand_over_us + self.broadcast_us + self.broadcast_host_us
        return before_us + self.host_us + self.draft_us + self.returned_us


@dataclass(frozen=True, slots=True)
class StageCost:
    """Microseconds that a stage is busy in a round of one micro-batch."""

    busy_us: float  # in total
    extras: StageExtras  # the part of it that is not the model's

    @property
    def stage_us(self) -> float:
        """Without the host's acceptance; drafting and messages are included."""
        return self.busy_us - self.extras.host_us

    @property
    def verify_us(self) -> float:
        """The LLM's step, including what starts it on all ranks."""
        return self.stage_us - self.extras.draft_us - self.extras.returned_us


@dataclass(frozen=True, slots=True)
class RoundCost:
    """One micro-batch's round by its parts, in microseconds. No other code decomposes a round."""

    draft_us: float  # before the first stage; drafting inside a stage is counted there
    draft_requests_us: float  # draft requests to other ranks, and trees back
    stages: tuple[StageCost, ...]
    hops_us: tuple[float, ...]
    latency_us: float  # the sum of all of these
    bottleneck_us: float  # of the busiest part; the first stage and the host's work count as one

    @property
    def drafting_us(self) -> float:
        """All SSM steps, wherever they run."""
        return self.draft_us + sum(stage.extras.draft_us for stage in self.stages)

    @property
    def messages_us(self) -> float:
        """Ids, features, draft requests and trees between rank 0 and the ranks that draft or hold the results."""
        return self.draft_requests_us + sum(stage.extras.returned_us for stage in self.stages)

    @property
    def host_us(self) -> float:
        return sum(stage.extras.host_us for stage in self.stages)

    def period_us(self, micro_batches: int) -> float:
        return max(self.latency_us, micro_batches * self.bottleneck_us)


@dataclass(frozen=True, slots=True)
class PricedChoice(Choice):
    """How rounds run, and how often."""

    period_us: float  # from one round of the batch to the next

    @property
    def per_token_us(self) -> float:
        """Microseconds per token of one request."""
        return self.period_us / self.entry.committed_tokens

    @property
    def tokens_per_s(self) -> float:
        """Over all requests."""
        return self.batch * self.entry.committed_tokens / self.period_us * 1e6


class Prices:
    """All prices of a round with one draft plan, one SSM place and micro-batches of ``requests`` requests."""

    def __init__(self, problem: Problem, place: SsmPlace, entry: DraftEntry, requests: int) -> None:
        self.problem, self.place, self.entry, self.requests = problem, place, entry, requests
        machine = problem.machine
        self.rows = entry.rows(requests)
        self.sizes = step_sizes(self.rows, requests, problem.context_tokens)
        self._sizes = tuple(self.sizes.items())
        self._extras: dict[tuple[int, int, bool, bool], StageExtras] = {}  # a search needs the same few many times
        self.hidden_bytes = self.rows * problem.llm.hidden_bytes
        self.step_us = machine.step_us.effective
        # A hop also carries the states of earlier layers that an SSM reads: their mean number over all cuts.
        taps = max((ssm.taps for ssm in problem.ssms), key=len, default=()) if place.drafts else ()
        self.crossing = 1.0 + sum(max(0.0, 1.0 - tap / problem.llm.blocks) for tap in taps)
        self.host_us = machine.round_us.effective + requests * machine.request_us.effective
        far = machine.network or machine.kinds[0].link
        self.ids_us = far.transfer_us(self.rows * _ID_BYTES) if machine.devices > 1 else 0.0
        request_us = self._draft_request_us(far)
        self.returned_us = self._results_us(far) + (request_us if place.draft_request_with_results else 0.0)
        self.draft_requests_us = request_us if place.draft_request_first else 0.0
        share = place.requests_a_device(requests, machine.devices)
        kinds = [machine.kinds[number] for number in place.kinds_beside(len(machine.kinds))]
        # Drafting before the first stage, and the part of it that occupies the devices of every stage.
        self.before_us = max([self.draft_us(kind, share, together=not place.separate) for kind in kinds], default=0.0)
        self.every_stage_us = self.before_us if place.in_every_stage else 0.0
        self.fixed_us = self.before_us + self.draft_requests_us
        self.fixed_bottleneck_us = self.before_us

    def unit_us(self, kind: int, degree: int, unit: str) -> float:
        """Time of the LLM's front, block or back on a stage."""
        return _llm_unit_us(self.problem.llm, self.problem.kind(kind), degree, unit, self._sizes)

    def draft_us(self, kind: NodeKind, requests: int, *, together: bool) -> float:
        """SSM steps for ``requests`` requests; ``together``: all SSMs share one device, else each has its own."""
        context, between = self.problem.context_tokens, self.between_us(requests)
        times = [ssm_us(ssm, kind, self.entry, requests, context) + between for ssm in self.problem.ssms]
        return sum(times) if together else max(times, default=0.0)

    def between_us(self, requests: int) -> float:
        """The host's work for one SSM's steps: handing over every step, and extending the requests' trees."""
        step_us = self.step_us + requests * self.problem.machine.step_request_us.effective
        return len(self.entry.ssm_rows) * step_us

    def stage_us(self, kind: int, degree: int, blocks: int, *, first: bool, last: bool) -> float:
        """Time that a stage is busy in a round, including ``ends_us``."""
        return blocks * self.unit_us(kind, degree, "block") + self.ends_us(kind, degree, first=first, last=last)

    def ends_us(self, kind: int, degree: int, *, first: bool, last: bool) -> float:
        """Time of a stage besides its blocks: embedding, LM head, and :meth:`extras`."""
        front = self.unit_us(kind, degree, "front") if first else 0.0
        back = self.unit_us(kind, degree, "back") if last else 0.0
        return front + back + self.extras(kind, degree, first=first, last=last).total_us

    def extras(self, kind: int, degree: int, *, first: bool, last: bool) -> StageExtras:
        """The parts of a stage's time that are not the model's."""
        stage = (kind, degree, first, last)
        if stage not in self._extras:
            self._extras[stage] = self._stage_extras(*stage)
        return self._extras[stage]

    def _stage_extras(self, kind: int, degree: int, first: bool, last: bool) -> StageExtras:
        node = self.problem.kind(kind)
        drafts = self.place.runs_in(first=first, last=last)
        return StageExtras(
            hand_over_us=self.step_us,
            broadcast_us=broadcast_us(node.link, self.rows * _ID_BYTES, degree) if first else 0.0,
            broadcast_host_us=self.step_us if first and not (last and degree == 1) else 0.0,  # like a hand-over
            host_us=self.host_us if first else 0.0,
            draft_us=self.draft_us(node, self.requests, together=True) if drafts else 0.0,
            returned_us=self.returned_us if last and not first else 0.0,
        )

    def _draft_request_us(self, far: Link) -> float:
        """Drafting on a rank other than 0: the draft request with the committed tokens, and the trees in reply."""
        if not self.entry.levels or self.problem.machine.devices == 1:
            return 0.0
        committed = self._feature_bytes(far, self.requests * self.entry.committed_tokens)
        return self.ids_us + far.transfer_us(self.rows * _ID_BYTES + committed)

    def _results_us(self, far: Link) -> float:
        """Chosen ids to rank 0, and the LLM's states that SSMs read, which go through rank 0 wherever SSMs live."""
        features = self._feature_bytes(far, self.rows)
        return self.ids_us + (far.transfer_us(features) if features and self.problem.machine.devices > 1 else 0.0)

    def _feature_bytes(self, far: Link, rows: float) -> float:
        columns = max((ssm.reads_features for ssm in self.problem.ssms), default=0) if self.entry.levels else 0
        dtype = self.problem.llm.dtype
        return far.sent_bytes(rows * columns * dtype.size_bytes, dtype)

    def hop_us(self, kind: int, source: int, target: int, *, new_node: bool) -> float:
        """From a stage of ``source`` ranks to one of ``target`` ranks on a node of ``kind``."""
        inside = self.problem.kind(kind).link
        between = self.problem.machine.network if new_node else inside
        assert between is not None
        sent_bytes = between.sent_bytes(self.hidden_bytes, self.problem.llm.dtype)
        return self.crossing * hop_us(between, inside, sent_bytes, source, target, shared=new_node)


def round_cost(prices: Prices, cuts: Sequence[Cut]) -> RoundCost:
    """The round of a plan whose stages are ``cuts``."""
    final = len(cuts) - 1
    ends = [(cut, i == 0, i == final) for i, cut in enumerate(cuts)]
    stages = tuple(
        StageCost(
            prices.stage_us(cut.kind, cut.degree, cut.blocks, first=first, last=last),
            prices.extras(cut.kind, cut.degree, first=first, last=last),
        )
        for cut, first, last in ends
    )
    hops = tuple(
        prices.hop_us(cut.kind, before.degree, cut.degree, new_node=cut.new_node)
        for before, cut in zip(cuts, cuts[1:], strict=False)
    )
    busy = [stage.busy_us for stage in stages]
    latency = prices.fixed_us + sum(busy) + sum(hops)
    bottleneck = max(prices.fixed_bottleneck_us, max(busy) + prices.every_stage_us, *hops)
    return RoundCost(prices.before_us, prices.draft_requests_us, stages, hops, latency, bottleneck)


def cost_of(problem: Problem, place: SsmPlace, choice: Choice, cuts: Sequence[Cut]) -> RoundCost:
    """The round of a plan under ``choice``."""
    return round_cost(Prices(problem, place, choice.entry, choice.micro), cuts)


def value_us(problem: Problem, entry: DraftEntry, batch: int, period_us: float) -> float:
    """The minimised value: us per token of one request (latency) or over all requests; inf beyond the limit."""
    per_request = period_us / entry.committed_tokens
    if problem.objective == "latency":
        return per_request
    if problem.objective == "goodput" and per_request > problem.limit_us:
        return math.inf
    return per_request / batch


@lru_cache(maxsize=1 << 16)
def _llm_unit_us(
    llm: ModelProfile, kind: NodeKind, degree: int, unit: str, sizes: tuple[tuple[str, int], ...]
) -> float:
    calls = llm.ranks[degree].calls[unit]
    return unit_us(kind.device, kind.link, llm.dtype, calls, dict(sizes), degree)


@lru_cache(maxsize=1 << 14)
def ssm_us(ssm: ModelProfile, kind: NodeKind, entry: DraftEntry, requests: int, context_tokens: int) -> float:
    """Microseconds of all steps of one SSM in a round."""
    return sum(model_us(ssm, kind, sizes) for sizes in ssm_sizes(entry, requests, context_tokens))


def ssm_sizes(entry: DraftEntry, requests: int, context_tokens: int) -> list[Sizes]:
    """The dim sizes of every SSM step of a round."""
    steps = [max(requests, math.ceil(requests * rows - 1e-9)) for rows in entry.ssm_rows]
    return [step_sizes(rows, requests, context_tokens) for rows in steps]


def model_us(model: ModelProfile, kind: NodeKind, sizes: Sizes) -> float:
    """Microseconds of a step of a whole model on one device."""
    calls = model.ranks[1].calls
    times = {unit: unit_us(kind.device, kind.link, model.dtype, part, sizes, 1) for unit, part in calls.items()}
    return times["front"] + model.blocks * times["block"] + times["back"]

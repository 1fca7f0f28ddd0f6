"""Predicted and measured: the lines of a round that the cost model prices and a run measures, and how they agree.

A round is a set of lines, (part, what) -> microseconds: operator classes of each stage, hops, drafting, messages, the
host. ``predicted_lines`` computes those of the cost model; their sum is the latency of rounds.py. Measurements have the
same lines (runtime/measure/stamps.py). Nothing is run here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexspec.compiler.artifact.plan import Stage
from flexspec.compiler.artifact.ssm_place import SsmPlace
from flexspec.compiler.prices.acceptance_profile import DraftEntry
from flexspec.compiler.prices.cost import call_times
from flexspec.compiler.prices.machine import NodeKind
from flexspec.compiler.prices.problem import Problem
from flexspec.compiler.prices.profile import UNITS, Call, ModelProfile, Sizes
from flexspec.compiler.prices.rounds import Cut, Prices, round_cost, ssm_sizes

Line = tuple[str, str]  # (part of the round, what of it)
Lines = Mapping[Line, float]  # microseconds

DRAFT, MESSAGES, HOST = "draft", "messages", "host"
BETWEEN = "between steps"
HAND_OVER = "hand over"
WAIT = "wait for ranks"
ALL = "all"


@dataclass(frozen=True, slots=True)
class Trial:
    """Rounds to predict and measure."""

    name: str
    stages: tuple[Stage, ...]
    cuts: tuple[Cut, ...]  # the stages as they are priced
    place: SsmPlace
    entry: DraftEntry  # the draft plan
    batch: int  # requests

    @property
    def rows(self) -> int:
        """Rows of the verify step."""
        return self.entry.rows(self.batch)

    @property
    def ranks(self) -> int:
        return sum(stage.degree for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A trial's lines, as predicted and as measured."""

    trial: Trial
    predicted: Lines
    measured: Lines
    rounds: int  # that were measured

    @property
    def predicted_us(self) -> float:
        return sum(self.predicted.values())

    @property
    def measured_us(self) -> float:
        return sum(self.measured.values())

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_us / self.measured_us

    def parts(self) -> list[str]:
        """The parts of the round, in the order in which they happen."""
        parts = dict.fromkeys(part for part, _ in (*self.predicted, *self.measured))
        return sorted(parts, key=_order)

    def rows(self) -> list[tuple[str, str, float, float]]:
        """(part, what, predicted us, measured us); the sum of a part (what: ``ALL``) precedes its lines."""
        rows: list[tuple[str, str, float, float]] = []
        for part in self.parts():
            names = dict.fromkeys(what for other, what in (*self.predicted, *self.measured) if other == part)
            lines = [
                (part, name, self.predicted.get((part, name), 0.0), self.measured.get((part, name), 0.0))
                for name in names
            ]
            rows.append((part, ALL, sum(line[2] for line in lines), sum(line[3] for line in lines)))
            rows += [line for line in lines if len(lines) > 1 or line[1] != ALL]
        return rows


def stage_part(number: int) -> str:
    return f"stage {number}"


def hop_part(number: int) -> str:
    return f"hop {number}-{number + 1}"


def _order(part: str) -> tuple[int, int, int]:
    """Drafting, then each stage and the hop after it, then messages and the host."""
    fixed = {DRAFT: (0, 0, 0), MESSAGES: (2, 0, 0), HOST: (3, 0, 0)}
    if part in fixed:
        return fixed[part]
    kind, _, number = part.partition(" ")
    return 1, int(number.partition("-")[0]), int(kind == "hop")


def predicted_lines(problem: Problem, trial: Trial) -> dict[Line, float]:
    """The cost model's lines of a round of one micro-batch."""
    prices = Prices(problem, trial.place, trial.entry, trial.batch)
    cost = round_cost(prices, trial.cuts)
    lines: dict[Line, float] = {}

    def add(part: str, what: str, us: float) -> None:
        if us:
            lines[part, what] = lines.get((part, what), 0.0) + us

    if trial.place.drafts:
        for what, us in _draft_lines(problem, trial).items():
            add(DRAFT, what, us)
        add(DRAFT, BETWEEN, len(problem.ssms) * prices.between_us(trial.batch))
    final = len(trial.cuts) - 1
    for number, cut in enumerate(trial.cuts):
        part = stage_part(number)
        for unit, count in zip(UNITS, (number == 0, cut.blocks, number == final), strict=True):
            calls = problem.llm.ranks[cut.degree].calls[unit]
            for what, us in _classes(problem.kind(cut.kind), problem.llm, calls, prices.sizes, cut.degree).items():
                add(part, what, count * us)
        extras = cost.stages[number].extras
        add(part, HAND_OVER, extras.hand_over_us)
        add(part, WAIT, extras.broadcast_us)
        add(MESSAGES, ALL, extras.broadcast_host_us + extras.returned_us)
        add(HOST, ALL, extras.host_us)
        if number < final:
            add(hop_part(number), ALL, cost.hops_us[number])
    return lines


def _draft_lines(problem: Problem, trial: Trial) -> dict[str, float]:
    """Operators of all SSM steps, on the first stage's device."""
    kind = problem.kind(trial.cuts[0].kind)
    lines: dict[str, float] = {}
    for ssm in problem.ssms:
        for sizes in ssm_sizes(trial.entry, trial.batch, problem.context_tokens):
            for unit, count in zip(UNITS, (1, ssm.blocks, 1), strict=True):
                for what, us in _classes(kind, ssm, ssm.ranks[1].calls[unit], sizes, 1).items():
                    lines[what] = lines.get(what, 0.0) + count * us
    return lines


def _classes(kind: NodeKind, model: ModelProfile, calls: Sequence[Call], sizes: Sizes, degree: int) -> dict[str, float]:
    """Microseconds of a unit's operators by their names."""
    times: dict[str, float] = {}
    for call, us in call_times(kind.device, kind.link, model.dtype, calls, sizes, degree):
        times[call.record.name] = times.get(call.record.name, 0.0) + us
    return times


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Rank correlation of two equally long sequences, ties sharing their mean rank; 0 if one is constant."""
    a, b = _ranks(xs), _ranks(ys)
    mean = (len(a) + 1) / 2
    spread = sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)
    return sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True)) / spread**0.5 if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values
    ]


def worst_ratio(outcomes: Sequence[Outcome]) -> float:
    """The largest factor between a round as predicted and as measured."""
    return max(max(outcome.ratio, 1 / outcome.ratio) for outcome in outcomes)

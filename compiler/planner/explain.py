"""Why this plan: the runners-up, what ruled out each degree, and what fewer or all devices would mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexspec.arithmetic import ceil_div
from flexspec.compiler.planner.plan_choice import ladder, uniform_plans
from flexspec.compiler.planner.search import Candidate, pareto_front, search
from flexspec.compiler.prices.memory import rank_bytes
from flexspec.compiler.prices.problem import Problem
from flexspec.compiler.prices.rounds import PricedChoice
from flexspec.errors import PlanError

RUNNERS = 5


@dataclass(frozen=True, slots=True)
class Explanation:
    """The best plan, compared with what was not chosen."""

    best: Candidate
    runners: tuple[Candidate, ...]
    why_not: tuple[tuple[int, str], ...]  # (degree, reason) for every degree that the plan does not use
    by_hand: Candidate | None  # the best plan with equal stages and one degree
    rungs: tuple[PricedChoice, ...]  # of the ladder
    notes: tuple[str, ...]  # sentences


def explain(problem: Problem, candidates: list[Candidate], measured_with: str = "") -> Explanation:
    """``candidates``: the result of the search. ``measured_with``: the LLM of the acceptance profile."""
    best = candidates[0]
    single = {degree: _only(problem, degree) for degree in problem.legal_degrees}
    by_hand = uniform_plans(problem)
    others = [*candidates, *itertools.chain.from_iterable(single.values()), *by_hand]
    runners: dict[object, Candidate] = {}
    for plan in sorted(others, key=lambda plan: plan.value_us):
        if plan.structure() != best.structure():
            runners.setdefault(plan.structure(), plan)
    used = {cut.degree for cut in best.cuts}
    why_not = tuple(
        (degree, _why_not(problem, best, degree, single.get(degree)))
        for degree in sorted(problem.degrees)
        if degree not in used
    )
    return Explanation(
        best,
        tuple(runners.values())[:RUNNERS],
        why_not,
        by_hand[0] if by_hand else None,
        tuple(ladder(problem, best.place, best.cuts)),
        tuple(_notes(problem, best, by_hand, measured_with)),
    )


def _only(problem: Problem, degree: int) -> list[Candidate]:
    """The best plans with one degree for all stages; empty if none fits or, under goodput, none meets the limit."""
    try:
        return search(problem, degrees=(degree,))
    except PlanError:
        return []


def _why_not(problem: Problem, best: Candidate, degree: int, plans: list[Candidate] | None) -> str:
    if degree in problem.llm.refused:
        return problem.llm.refused[degree]
    if degree > max(kind.devices for kind in problem.machine.kinds):
        return "no node has that many devices, and a stage stays inside one node"
    if plans:
        ratio = plans[0].value_us / best.value_us
        return f"best plan with only this degree: {ratio:.2f} times the time ({describe(problem, plans[0])})"
    fastest = _fastest(problem, degree) if problem.objective == "goodput" else None
    if fastest:
        time, limit = f"{fastest.per_token_us / 1e3:.2f} ms a token at best", f"{problem.limit_us / 1e3:g}"
        return f"misses the limit: {time}, of {limit} ({describe(problem, fastest)}, {fastest.batch} at once)"
    count = sum(kind.devices // degree * kind.count for kind in problem.machine.kinds)
    blocks = ceil_div(problem.llm.blocks, max(1, min(count, problem.llm.blocks)))
    kind = max(problem.machine.kinds, key=lambda kind: kind.device.memory_bytes.effective)
    parts = rank_bytes(problem.llm, degree, blocks, problem.workload, kind.device, first=True, last=count == 1)
    return (
        f"does not fit: {count} stages at most, so {blocks} blocks or more in one, {parts.total / 1e9:.1f} GB a rank "
        f"(weights {parts.weights / 1e9:.1f}, KV {parts.kv / 1e9:.1f}) of {parts.limit / 1e9:.1f}"
    )


def _fastest(problem: Problem, degree: int) -> Candidate | None:
    """The plan with the least latency among those with only this degree, whatever the limit; None if none fits."""
    front = pareto_front(replace(problem, objective="throughput", limit_us=math.inf, degrees=(degree,)))
    return front[0] if front else None


def describe(problem: Problem, plan: Candidate) -> str:
    """A plan in a few words: degree and blocks of its stages, and the SSM place."""
    several = len(problem.machine.kinds) > 1
    parts = []
    for (kind, degree), group in itertools.groupby(plan.cuts, key=lambda cut: (cut.kind, cut.degree)):
        blocks = [cut.blocks for cut in group]
        device = f" {problem.kind(kind).device.name}" if several else ""
        times = f"{len(blocks)} x " if len(blocks) > 1 else ""
        parts.append(f"{times}TP {degree}{device} ({_blocks(blocks)})")
    return f"{' + '.join(parts)}, {place_words(plan)}"


def _blocks(counts: Sequence[int]) -> str:
    """``40 blocks``, ``39 and 41 blocks``, ``9 to 12 blocks``."""
    if len(set(counts)) == 1:
        return f"{counts[0]} block{'s' if counts[0] > 1 else ''}{' each' if len(counts) > 1 else ''}"
    if len(counts) == 2:
        return f"{counts[0]} and {counts[1]} blocks"
    return f"{min(counts)} to {max(counts)} blocks"


def place_words(plan: Candidate) -> str:
    """Where the SSMs of a plan live."""
    return plan.place.with_stages(len(plan.cuts)).label


def _notes(problem: Problem, best: Candidate, by_hand: list[Candidate], measured_with: str) -> list[str]:
    notes = []
    if measured_with and not problem.llm.name.lower().startswith(measured_with.lower()):
        notes.append(
            f"tokens per round were measured with {measured_with}, not with {problem.llm.name}: they may differ"
        )
    idle = problem.machine.devices - sum(cut.degree for cut in best.cuts)
    idle -= len(problem.ssms) if best.place.separate else 0
    if idle > 0:
        text = f"fewer devices are faster: {idle} of {problem.machine.devices} have no stage"
        full = [c for c in by_hand if sum(cut.degree for cut in c.cuts) == problem.machine.devices]
        if full:
            text += f"; equal stages on all of them take {full[0].value_us / best.value_us:.2f} times the time"
        notes.append(text)
    if not best.place.drafts and problem.drafting:
        notes.append(
            "speculation does not pay here: off is at least as fast as every measured draft plan at every SSM place"
        )
    if problem.llm.note:
        notes.append(f"{problem.llm.name}: {problem.llm.note}")
    notes += [f"{ssm.name}: {ssm.note}" for ssm in problem.ssms if ssm.note]
    return notes

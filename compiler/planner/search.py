"""Exact search for the plan with the least round time per token.

The outer loop tries every SSM place, draft plan, batch size and micro-batch count. For each, the dynamic program of
stage_program.py gives the least latency of plans whose busiest part stays below a limit, and bisection over the values
that the bottleneck can take finds the best limit. Among plans of equal value, the one with the most free memory on its
fullest device wins. docs/design/planning.md has the proof.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flexspec.compiler.artifact.ssm_place import (
    EveryDevice,
    FirstStage,
    LastStage,
    NoSsm,
    SeparateDevices,
    SsmPlace,
)
from flexspec.compiler.planner.stage_program import INF, StageProgram, Vector
from flexspec.compiler.prices.acceptance_profile import DraftEntry
from flexspec.compiler.prices.memory import cache_tokens, rank_bytes
from flexspec.compiler.prices.problem import TIE, Choice, Problem, choices
from flexspec.compiler.prices.rounds import Cut, PricedChoice, Prices, round_cost, value_us
from flexspec.errors import PlanError

MAX_STATES = 20_000
WORTH_SHOWING = 2.0  # an SSM place whose best plan takes this many times the best time is left out
# The likeliest places first: their plans prune the others.
_ORDER = (FirstStage, LastStage, EveryDevice, SeparateDevices, NoSsm)


@dataclass(frozen=True, slots=True)
class Candidate(PricedChoice):
    """A complete plan with its value."""

    value_us: float  # what the search minimises (rounds.value_us)
    place: SsmPlace
    cuts: tuple[Cut, ...]
    free_bytes: float  # on its fullest device

    def structure(self) -> tuple[str, tuple[Cut, ...]]:
        """Equal for two plans that differ only in how rounds run."""
        return self.place.with_stages(len(self.cuts)).name, self.cuts


def search(problem: Problem, *, degrees: Sequence[int] = (), places: Sequence[SsmPlace] = ()) -> list[Candidate]:
    """The best plan, then the best of each other SSM place that comes close. Raises PlanError if no plan fits.

    ``degrees`` and ``places`` narrow the search; by default all legal ones are tried.
    """
    best: dict[SsmPlace, Candidate] = {}
    cutoff = INF
    for place in sorted(places or problem.places(), key=lambda place: _ORDER.index(type(place))):
        limit = cutoff if place.drafts else INF
        candidate = _PlaceSearch(problem, place, tuple(degrees) or problem.legal_degrees).best(limit)
        if candidate:
            best[place] = candidate
            cutoff = min(cutoff, WORTH_SHOWING * candidate.value_us)
    if not best:
        raise no_plan(problem)
    limit = TIE * min(candidate.value_us for candidate in best.values())
    return sorted(best.values(), key=lambda c: (max(c.value_us, limit), -c.free_bytes))


def no_plan(problem: Problem) -> PlanError:
    """The error if no plan fits: the fastest plan misses the limit, or the byte table of one block."""
    without = replace(problem, objective="throughput", limit_us=INF)
    front = pareto_front(without) if problem.objective == "goodput" else []
    if front:
        return PlanError(
            f"{problem.llm.name} on {problem.machine.name}: {front[0].per_token_us / 1e3:.3g} ms a token at best",
            f"a limit that some plan meets, not {problem.limit_us / 1e3:g} ms",
            "loosen --limit-ms, or plan for a faster machine",
        )
    kind = max(problem.machine.kinds, key=lambda kind: kind.device.memory_bytes.effective)
    degree = max((d for d in problem.legal_degrees if d <= kind.devices), default=1)
    parts = rank_bytes(problem.llm, degree, 1, problem.workload, kind.device, first=True, last=False)
    weight_bytes = problem.llm.weight_bytes()
    cache_bytes = problem.llm.blocks * problem.llm.ranks[1].kv_bytes_per_token * cache_tokens(problem.workload)
    available = sum(k.device.memory_bytes.effective * k.devices * k.count for k in problem.machine.kinds)
    rows = ", ".join(f"{name} {count / 1e9:.2f} GB" for name, count in parts.table())
    return PlanError(
        f"no plan of {problem.llm.name} on {problem.machine.name} fits: weights {weight_bytes / 1e9:.1f} GB "
        f"and KV {cache_bytes / 1e9:.1f} GB on "
        f"{problem.machine.devices} devices with {available / 1e9:.1f} GB; one block at degree {degree}: {rows}",
        "a plan whose every rank fits its device",
        "use more or larger devices, fewer requests or a shorter context",
    )


def pareto_front(problem: Problem) -> list[Candidate]:
    """Plans that no other dominates in both us per token of a request and total tokens/s; fastest answer first."""
    candidates: list[tuple[Candidate, _LatencySolver]] = []
    for place in problem.places():
        candidates += _PlaceSearch(problem, place, problem.legal_degrees).all_candidates()
    front: list[tuple[Candidate, _LatencySolver]] = []
    for plan, solver in sorted(candidates, key=lambda pair: (pair[0].per_token_us, -pair[0].tokens_per_s)):
        if front and plan.tokens_per_s <= front[-1][0].tokens_per_s * TIE:
            continue
        if front and plan.per_token_us <= front[-1][0].per_token_us * TIE:  # equally fast, with higher throughput
            front.pop()
        front.append((plan, solver))
    return [solver.roomiest(plan) for plan, solver in front]


def _period_of(problem: Problem, entry: DraftEntry, batch: int, value: float) -> float:
    """The period at which a choice has this value: the inverse of value_us."""
    return value * entry.committed_tokens * (1 if problem.objective == "latency" else batch)


class _PlaceSearch:
    """The inner search for one SSM place."""

    def __init__(self, problem: Problem, place: SsmPlace, degrees: tuple[int, ...]) -> None:
        self.problem, self.place, self.degrees = problem, place, degrees
        self.pools = problem.pools(place)
        if math.prod(pool.count + 1 for pool in self.pools) > MAX_STATES:
            kinds = ", ".join(f"{pool.count} x {pool.devices}" for pool in self.pools)
            raise PlanError(
                f"nodes of too many kinds ({kinds})", f"at most {MAX_STATES} ways to count them",
                "describe fewer nodes of each kind",
            )  # fmt: skip
        self.free = {  # bytes by number of blocks; negative if the stage does not fit
            (pool.kind, degree, first, last): self._free_bytes(pool.kind, degree, first, last)
            for pool in self.pools
            for degree in degrees
            for first, last in itertools.product((False, True), repeat=2)
        }
        self.drafting_free = problem.drafting_free_bytes(place)

    def _free_bytes(self, kind: int, degree: int, first: bool, last: bool) -> Vector:
        room, per_block = self.problem.free_bytes(kind, degree, self.place, first=first, last=last)
        return room - np.arange(self.problem.llm.blocks + 1, dtype=np.float64) * per_block

    def best(self, cutoff: float) -> Candidate | None:
        """The best plan below ``cutoff``. Choices are tried in order of their lower bound."""
        solvers: dict[tuple[DraftEntry, int], _LatencySolver] = {}
        bounds = []
        for choice in choices(self.problem.entries_at(self.place), self.problem.tried_batches):
            solver = self._solver(solvers, choice)
            bound = value_us(self.problem, choice.entry, choice.batch, solver.least_period_us(choice.micro_batches))
            bounds.append((bound, choice, solver))
        equal: list[tuple[Candidate, _LatencySolver]] = []
        for bound, choice, solver in sorted(bounds, key=lambda item: item[0]):
            if math.isinf(bound) or bound >= cutoff * TIE:
                break
            candidate = self.candidate(solver, choice, cutoff * TIE)
            if candidate:
                equal.append((candidate, solver))
                cutoff = min(cutoff, candidate.value_us)
        roomy = [solver.roomiest(plan) for plan, solver in equal if plan.value_us <= cutoff * TIE]
        return max(roomy, key=lambda plan: plan.free_bytes, default=None)

    def all_candidates(self) -> list[tuple[Candidate, _LatencySolver]]:
        """The best plan of every choice, whatever the objective."""
        solvers: dict[tuple[DraftEntry, int], _LatencySolver] = {}
        pairs: list[tuple[Candidate, _LatencySolver]] = []
        for choice in choices(self.problem.entries_at(self.place), self.problem.batches):
            solver = self._solver(solvers, choice)
            candidate = self.candidate(solver, choice, INF)
            pairs += [(candidate, solver)] if candidate else []
        return pairs

    def _solver(self, solvers: dict[tuple[DraftEntry, int], _LatencySolver], choice: Choice) -> _LatencySolver:
        """The solver for a choice's prices, shared by all choices with the same micro-batch size."""
        key = (choice.entry, choice.micro)
        if key not in solvers:
            solvers[key] = _LatencySolver(self, *key)
        return solvers[key]

    def candidate(self, solver: _LatencySolver, choice: Choice, cutoff: float) -> Candidate | None:
        """The best plan of a choice; None if none is below ``cutoff`` and within the limit."""
        entry, batch, count = choice.entry, choice.batch, choice.micro_batches
        period_us, cuts = solver.best_period(count, _period_of(self.problem, entry, batch, cutoff))
        value = value_us(self.problem, entry, batch, period_us)
        if value >= cutoff or math.isinf(value):
            return None
        return Candidate(entry, batch, count, period_us, value, self.place, cuts, self.least_free_bytes(cuts))

    def least_free_bytes(self, cuts: Sequence[Cut]) -> float:
        """Free bytes on the fullest device of a plan."""
        final = len(cuts) - 1
        stages = [self.free[c.kind, c.degree, i == 0, i == final][c.blocks] for i, c in enumerate(cuts)]
        return float(min([*stages, self.drafting_free]))


class _LatencySolver:
    """Least latency when no part is busier than a limit, for one set of prices."""

    def __init__(self, where: _PlaceSearch, entry: DraftEntry, requests: int) -> None:
        self.where, self.prices = where, Prices(where.problem, where.place, entry, requests)
        self.blocks = where.problem.llm.blocks
        self.hops: dict[tuple[int, int, int, bool], float] = {}
        self.solved: dict[float, tuple[float, float, tuple[Cut, ...]]] = {}  # by beta: ceiling, latency, cuts

    @cached_property
    def costs(self) -> dict[tuple[int, int, bool, bool], Vector]:
        return {key: self._stage_costs(*key) for key in self.where.free}

    def _stage_costs(self, kind: int, degree: int, first: bool, last: bool) -> Vector:
        """Time by number of blocks; inf if the stage does not fit, and for zero blocks."""
        prices = self.prices
        block_us = prices.unit_us(kind, degree, "block")
        times = np.arange(self.blocks + 1) * block_us + prices.ends_us(kind, degree, first=first, last=last)
        times[0] = INF
        return np.where(self.where.free[kind, degree, first, last] >= 0, times, INF)

    @cached_property
    def values(self) -> Vector:
        """All values that the bottleneck can take, ascending from the part that every plan has."""
        floor = self.prices.fixed_bottleneck_us
        parts = [floor, *(self.hop_us(*key) for key in self._hop_keys())]
        times = [costs[np.isfinite(costs)] + self.prices.every_stage_us for costs in self.costs.values()]
        values = np.unique(np.concatenate([np.array(parts), *times]))
        return np.asarray(values[values >= floor], np.float64)

    def _hop_keys(self) -> list[tuple[int, int, int, bool]]:
        kinds = dict.fromkeys(pool.kind for pool in self.where.pools)
        degrees = self.where.degrees
        several = self.where.problem.machine.network is not None
        news = (False, True) if several else (False,)
        return [(k, a, b, new) for k in kinds for a in degrees for b in degrees for new in news]

    def hop_us(self, kind: int, source: int, target: int, new_node: bool) -> float:
        key = (kind, source, target, new_node)
        if key not in self.hops:
            self.hops[key] = self.prices.hop_us(kind, source, target, new_node=new_node)
        return self.hops[key]

    def latency(self, beta: float, ceiling_us: float) -> tuple[float, tuple[Cut, ...]]:
        """The least latency with no part busier than ``beta``, and its cuts; inf if it is not below the ceiling."""
        known = self.solved.get(beta)
        if known is None or (math.isinf(known[1]) and known[0] < ceiling_us):
            # The program prunes by the ceiling, so a result above it is not necessarily the least.
            latency, cuts = self._program(beta, ceiling_us).solve()
            self.solved[beta] = known = (ceiling_us, *((latency, cuts) if latency < ceiling_us else (INF, ())))
        return known[1:] if known[1] < ceiling_us else (INF, ())

    def _program(self, beta: float, ceiling_us: float, spare_bytes: float = 0.0) -> StageProgram:
        """The program for stages no busier than ``beta`` that leave ``spare_bytes`` free on their devices."""
        where, every_stage_us, free = self.where, self.prices.every_stage_us, self.where.free
        costs = {
            key: np.where((times + every_stage_us <= beta) & (free[key] >= spare_bytes), times, INF)
            for key, times in self.costs.items()
        }
        rest_us = min((block for block, _ in self._block_us()), default=0.0)
        return StageProgram(
            where.pools, where.degrees, self.blocks, costs, self.hop_us, beta, self.prices.fixed_us, rest_us, ceiling_us
        )

    def roomiest(self, best: Candidate) -> Candidate:
        """The plan with the most free memory among those that run like ``best`` and take no longer.

        Found by bisection over the bytes to leave free; each step solves one program.
        """
        count, where = best.micro_batches, self.where
        period_us = best.period_us * TIE
        beta = INF if count == 1 else period_us / count
        spares = np.unique(np.minimum(np.concatenate(list(where.free.values())), where.drafting_free))
        spares = spares[spares > best.free_bytes]
        low, high = 0, len(spares)  # a plan exists for all spares below low, and for none from high on
        while low < high:
            middle = (low + high) // 2
            latency, cuts = self._program(beta, period_us, float(spares[middle])).solve()
            if latency >= period_us:
                high = middle
                continue
            period = round_cost(self.prices, cuts).period_us(count)
            value = value_us(where.problem, best.entry, best.batch, period)
            free_bytes = where.least_free_bytes(cuts)
            best = replace(best, value_us=value, period_us=period, cuts=cuts, free_bytes=free_bytes)
            low = int(np.searchsorted(spares, free_bytes, "right"))
        return best

    def _block_us(self) -> list[tuple[float, int]]:
        """(microseconds of a block, degree) for every kind of node and every degree."""
        kinds = dict.fromkeys(pool.kind for pool in self.where.pools)
        return [(self.prices.unit_us(kind, d, "block"), d) for kind in kinds for d in self.where.degrees]

    def least_period_us(self, count: int) -> float:
        """A lower bound of the period: the fastest blocks, their device time shared evenly by all devices."""
        block_times = self._block_us()
        if not block_times:
            return INF
        devices = sum(pool.devices * pool.count for pool in self.where.pools)
        latency = self.prices.fixed_us + self.blocks * min(block for block, _ in block_times)
        shared = (
            self.blocks * min(block * degree for block, degree in block_times) / devices + self.prices.every_stage_us
        )
        least = max(latency, count * max(shared, self.prices.fixed_bottleneck_us))
        return least * (1 - 1e-12)  # rounding of sums must not lift the bound above the true value

    def best_period(self, count: int, ceiling_us: float) -> tuple[float, tuple[Cut, ...]]:
        """The least max(latency, count * bottleneck) over all plans: where a falling and a rising curve meet.

        Only periods below the ceiling count: no part of such a plan is busier than ceiling / count.
        """
        if count == 1:
            return self.latency(INF, ceiling_us)
        if math.isinf(self.latency(INF if math.isinf(ceiling_us) else ceiling_us / count, ceiling_us)[0]):
            return INF, ()
        low, high = 0, len(self.values) - 1  # first value whose latency is at most count * value
        while low < high:
            middle = (low + high) // 2
            if self.latency(float(self.values[middle]), ceiling_us)[0] <= count * self.values[middle]:
                high = middle
            else:
                low = middle + 1
        beta = float(self.values[low])
        latency, cuts = self.latency(beta, ceiling_us)
        answers = [(max(latency, count * beta), cuts)]
        if low:
            answers.append(self.latency(float(self.values[low - 1]), ceiling_us))
        return min(answers, key=lambda item: item[0])

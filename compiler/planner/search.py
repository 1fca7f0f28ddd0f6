"""Exact search for the plan of least round time per token.

Outside, everything that shapes a round is tried: SSM place, draft plan, batch, micro-batches. Inside, the dynamic
program of stage_program.py gives the least latency of plans whose busiest part stays below a limit, and the best limit
is found by bisection over the values that a stage, hop or host can take. Among plans of equal value the one with the
most free memory on its fullest device is taken. docs/design/planning.md has the proof.
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
WORTH_TELLING = 2.0  # a place whose best plan takes this many times the time is left out
# The likeliest first: what they find cuts the others short.
_ORDER = (FirstStage, LastStage, EveryDevice, SeparateDevices, NoSsm)


@dataclass(frozen=True, slots=True)
class Candidate(PricedChoice):
    """A plan: everything that shapes its round, with the value that was minimised (see rounds.value_us)."""

    value_us: float
    place: SsmPlace
    cuts: tuple[Cut, ...]
    free_bytes: float  # what its fullest device has left

    def structure(self) -> tuple[str, tuple[Cut, ...]]:
        """What makes two plans different ones."""
        return self.place.with_stages(len(self.cuts)).name, self.cuts


def search(problem: Problem, *, degrees: Sequence[int] = (), places: Sequence[SsmPlace] = ()) -> list[Candidate]:
    """The best plan first, then the best of other SSM places that are not far behind. Raises PlanError if nothing fits.

    ``degrees`` and ``places`` narrow the search; by default all that are legal are tried.
    """
    best: dict[SsmPlace, Candidate] = {}
    cutoff = INF
    for place in sorted(places or problem.places(), key=lambda place: _ORDER.index(type(place))):
        limit = cutoff if place.drafts else INF
        found = _Place(problem, place, tuple(degrees) or problem.legal_degrees).best(limit)
        if found:
            best[place] = found
            cutoff = min(cutoff, WORTH_TELLING * found.value_us)
    if not best:
        raise no_plan(problem)
    limit = TIE * min(each.value_us for each in best.values())
    return sorted(best.values(), key=lambda c: (max(c.value_us, limit), -c.free_bytes))


def no_plan(problem: Problem) -> PlanError:
    """Why there is none: the limit that the fastest plan misses, or the byte table of the least block."""
    without = replace(problem, objective="throughput", limit_us=INF)
    front = pareto_front(without) if problem.objective == "goodput" else []
    if front:
        return PlanError(
            f"{problem.llm.name} on {problem.machine.name}: {front[0].per_token_us / 1e3:.3g} ms a token at best",
            f"a limit that some plan meets, not {problem.limit_us / 1e3:g} ms",
            "loosen --limit-ms, or plan for a faster machine",
        )
    kind = max(problem.machine.kinds, key=lambda each: each.device.memory_bytes.effective)
    degree = max((d for d in problem.legal_degrees if d <= kind.devices), default=1)
    parts = rank_bytes(problem.llm, degree, 1, problem.workload, kind.device, first=True, last=False)
    whole = problem.llm.weight_bytes()
    cached = problem.llm.blocks * problem.llm.ranks[1].kv_bytes_per_token * cache_tokens(problem.workload)
    have = sum(k.device.memory_bytes.effective * k.devices * k.count for k in problem.machine.kinds)
    rows = ", ".join(f"{name} {count / 1e9:.2f} GB" for name, count in parts.table())
    return PlanError(
        f"no plan of {problem.llm.name} on {problem.machine.name} fits: weights {whole / 1e9:.1f} GB "
        f"and KV {cached / 1e9:.1f} GB on "
        f"{problem.machine.devices} devices with {have / 1e9:.1f} GB; one block at degree {degree}: {rows}",
        "a plan whose every rank fits its device",
        "use more or larger devices, fewer requests or a shorter context",
    )


def pareto_front(problem: Problem) -> list[Candidate]:
    """Plans of which none is better in both us per token of a request and tokens/s of all; fastest answer first."""
    found: list[tuple[Candidate, _Solver]] = []
    for place in problem.places():
        found += _Place(problem, place, problem.legal_degrees).all_candidates()
    front: list[tuple[Candidate, _Solver]] = []
    for each, solver in sorted(found, key=lambda pair: (pair[0].per_token_us, -pair[0].tokens_per_s)):
        if front and each.tokens_per_s <= front[-1][0].tokens_per_s * TIE:
            continue
        if front and each.per_token_us <= front[-1][0].per_token_us * TIE:  # as fast, and more of all
            front.pop()
        front.append((each, solver))
    return [solver.roomiest(each) for each, solver in front]


def _period_of(problem: Problem, entry: DraftEntry, batch: int, value: float) -> float:
    """The period at which a combination has this value (the inverse of value_us)."""
    return value * entry.committed_tokens * (1 if problem.objective == "latency" else batch)


class _Place:
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
        self.free = {  # by number of blocks; below 0 the stage does not fit
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
        solvers: dict[tuple[DraftEntry, int], _Solver] = {}
        bounds = []
        for choice in choices(self.problem.entries_at(self.place), self.problem.tried_batches):
            solver = self._solver(solvers, choice)
            bound = value_us(self.problem, choice.entry, choice.batch, solver.least_period_us(choice.micro_batches))
            bounds.append((bound, choice, solver))
        equal: list[tuple[Candidate, _Solver]] = []
        for bound, choice, solver in sorted(bounds, key=lambda item: item[0]):
            if math.isinf(bound) or bound >= cutoff * TIE:
                break
            candidate = self.candidate(solver, choice, cutoff * TIE)
            if candidate:
                equal.append((candidate, solver))
                cutoff = min(cutoff, candidate.value_us)
        roomy = [solver.roomiest(plan) for plan, solver in equal if plan.value_us <= cutoff * TIE]
        return max(roomy, key=lambda plan: plan.free_bytes, default=None)

    def all_candidates(self) -> list[tuple[Candidate, _Solver]]:
        """The best plan of every choice, whatever the objective."""
        solvers: dict[tuple[DraftEntry, int], _Solver] = {}
        pairs: list[tuple[Candidate, _Solver]] = []
        for choice in choices(self.problem.entries_at(self.place), self.problem.batches):
            solver = self._solver(solvers, choice)
            candidate = self.candidate(solver, choice, INF)
            pairs += [(candidate, solver)] if candidate else []
        return pairs

    def _solver(self, solvers: dict[tuple[DraftEntry, int], _Solver], choice: Choice) -> _Solver:
        """The solver of a choice's prices, which choices with micro-batches of one size share."""
        key = (choice.entry, choice.micro)
        if key not in solvers:
            solvers[key] = _Solver(self, *key)
        return solvers[key]

    def candidate(self, solver: _Solver, choice: Choice, cutoff: float) -> Candidate | None:
        """The best plan of a choice, if there is one below ``cutoff`` (and within the limit)."""
        entry, batch, count = choice.entry, choice.batch, choice.micro_batches
        period_us, cuts = solver.best_period(count, _period_of(self.problem, entry, batch, cutoff))
        value = value_us(self.problem, entry, batch, period_us)
        if value >= cutoff or math.isinf(value):
            return None
        return Candidate(entry, batch, count, period_us, value, self.place, cuts, self.least_free_bytes(cuts))

    def least_free_bytes(self, cuts: Sequence[Cut]) -> float:
        """Bytes free on the fullest device of a plan."""
        final = len(cuts) - 1
        stages = [self.free[c.kind, c.degree, i == 0, i == final][c.blocks] for i, c in enumerate(cuts)]
        return float(min([*stages, self.drafting_free]))


class _Solver:
    """Least latency under a bound on the busiest part, for one set of prices."""

    def __init__(self, where: _Place, entry: DraftEntry, requests: int) -> None:
        self.where, self.prices = where, Prices(where.problem, where.place, entry, requests)
        self.blocks = where.problem.llm.blocks
        self.hops: dict[tuple[int, int, int, bool], float] = {}
        self.solved: dict[float, tuple[float, float, tuple[Cut, ...]]] = {}  # by beta: ceiling, latency, cuts

    @cached_property
    def costs(self) -> dict[tuple[int, int, bool, bool], Vector]:
        return {key: self._stage_costs(*key) for key in self.where.free}

    def _stage_costs(self, kind: int, degree: int, first: bool, last: bool) -> Vector:
        """Time by number of blocks; inf where the stage does not fit (and for no blocks)."""
        prices = self.prices
        block_us = prices.unit_us(kind, degree, "block")
        times = np.arange(self.blocks + 1) * block_us + prices.ends_us(kind, degree, first=first, last=last)
        times[0] = INF
        return np.where(self.where.free[kind, degree, first, last] >= 0, times, INF)

    @cached_property
    def values(self) -> Vector:
        """What the bottleneck can be, ascending, from the least that every plan has."""
        floor = self.prices.fixed_bottleneck_us
        found = [floor, *(self.hop_us(*key) for key in self._hop_keys())]
        times = [costs[np.isfinite(costs)] + self.prices.every_stage_us for costs in self.costs.values()]
        values = np.unique(np.concatenate([np.array(found), *times]))
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
        """The least latency with no part busier than ``beta``, and its cuts; inf when none is below the ceiling."""
        known = self.solved.get(beta)
        if known is None or (math.isinf(known[1]) and known[0] < ceiling_us):
            # What is not below the ceiling may have passed the program by chance: it need not be the least.
            latency, cuts = self._program(beta, ceiling_us).solve()
            self.solved[beta] = known = (ceiling_us, *((latency, cuts) if latency < ceiling_us else (INF, ())))
        return known[1:] if known[1] < ceiling_us else (INF, ())

    def _program(self, beta: float, ceiling_us: float, spare_bytes: float = 0.0) -> StageProgram:
        """The program for stages that are not busier than ``beta`` and leave ``spare_bytes`` of their devices free."""
        where, every_stage_us, free = self.where, self.prices.every_stage_us, self.where.free
        costs = {
            key: np.where((times + every_stage_us <= beta) & (free[key] >= spare_bytes), times, INF)
            for key, times in self.costs.items()
        }
        rest_us = min((block for block, _ in self._block_us()), default=0.0)
        return StageProgram(
            where.pools, where.degrees, self.blocks, costs, self.hop_us, beta, self.prices.fixed_us, rest_us, ceiling_us
        )

    def roomiest(self, found: Candidate) -> Candidate:
        """Of the plans that are run like ``found`` and take no longer, the one with the most free memory.

        Bytes to leave free are raised by bisection: one program tells whether such a plan is there.
        """
        count, where = found.micro_batches, self.where
        period_us = found.period_us * TIE
        beta = INF if count == 1 else period_us / count
        spares = np.unique(np.minimum(np.concatenate(list(where.free.values())), where.drafting_free))
        spares = spares[spares > found.free_bytes]
        low, high = 0, len(spares)  # below low there is a plan, from high on there is none
        while low < high:
            middle = (low + high) // 2
            latency, cuts = self._program(beta, period_us, float(spares[middle])).solve()
            if latency >= period_us:
                high = middle
                continue
            period = round_cost(self.prices, cuts).period_us(count)
            value = value_us(where.problem, found.entry, found.batch, period)
            free_bytes = where.least_free_bytes(cuts)
            found = replace(found, value_us=value, period_us=period, cuts=cuts, free_bytes=free_bytes)
            low = int(np.searchsorted(spares, free_bytes, "right"))
        return found

    def _block_us(self) -> list[tuple[float, int]]:
        """(time of a block, degree) for every kind of device and degree."""
        kinds = dict.fromkeys(pool.kind for pool in self.where.pools)
        return [(self.prices.unit_us(kind, d, "block"), d) for kind in kinds for d in self.where.degrees]

    def least_period_us(self, count: int) -> float:
        """A lower bound: blocks at their fastest, and their device time shared evenly by all devices."""
        fit = self._block_us()
        if not fit:
            return INF
        devices = sum(pool.devices * pool.count for pool in self.where.pools)
        latency = self.prices.fixed_us + self.blocks * min(block for block, _ in fit)
        shared = self.blocks * min(block * degree for block, degree in fit) / devices + self.prices.every_stage_us
        least = max(latency, count * max(shared, self.prices.fixed_bottleneck_us))
        return least * (1 - 1e-12)  # sums in another order must not exceed what they bound

    def best_period(self, count: int, ceiling_us: float) -> tuple[float, tuple[Cut, ...]]:
        """min over plans of max(latency, count * bottleneck): the crossing of a falling and a rising curve.

        Only periods below the ceiling are looked for: such a plan has no part busier than its share of the ceiling.
        """
        if count == 1:
            return self.latency(INF, ceiling_us)
        if math.isinf(self.latency(INF if math.isinf(ceiling_us) else ceiling_us / count, ceiling_us)[0]):
            return INF, ()
        low, high = 0, len(self.values) - 1  # the answer's index: first value whose latency is below count * value
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

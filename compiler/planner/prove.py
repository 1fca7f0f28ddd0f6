"""An independent check of the search: enumeration of small spaces, branch and bound with a gap for large ones.

Shares the prices of a round with the search, since they are the objective, but not its algorithm: this file must not
import ``search``. It builds plans stage by stage and evaluates all draft plans, batches and micro-batch counts of a
plan at once, as vectors. Enumeration also finds how much memory the best plans leave free.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact.ssm_place import SsmPlace
from flexspec.compiler.prices.problem import TIE, Problem, choices
from flexspec.compiler.prices.rounds import Prices

ENUMERATED = 200_000
EXPANSIONS = 3_000
Vector = NDArray[np.float64]
FORMULA = "max(latency, micro-batches * bottleneck) of a round / committed tokens (/ batch, unless latency)"


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is proven about the lowest value of all plans."""

    method: str  # "enumeration" or "branch and bound"
    plans: int  # stage structures over all SSM places
    choices: int  # (SSM place, draft plan, batch, micro-batches) of a structure, at most
    best_us: float  # the lowest value seen
    bound_us: float  # lower bound of every plan's value
    examined: int  # plans, or partial plans
    free_bytes: int | None = None  # most that plans with that value leave on their fullest device; None: unknown

    @property
    def gap(self) -> float:
        return max(0.0, 1.0 - self.bound_us / self.best_us) if math.isfinite(self.best_us) else 0.0

    @property
    def proven(self) -> bool:
        return self.gap <= 1e-9

    def refutes(self, value_us: float, free_bytes: float) -> bool:
        """Whether a plan has a lower value, or an equal one with more memory free."""
        return value_us > self.best_us * TIE or (self.free_bytes is not None and self.free_bytes > free_bytes)

    def to_json(self) -> dict[str, object]:
        names = ("method", "plans", "choices", "best_us", "bound_us", "examined", "gap", "proven", "free_bytes")
        return {"formula": FORMULA, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True)
class _Partial:
    """The first stages of a plan."""

    blocks: int  # placed so far
    nodes: tuple[int, ...]  # used, by pool
    pool: int  # of the last stage
    used: int  # devices of its node, up to its end
    degree: int  # of the last stage
    latency: Vector  # so far
    bottleneck: Vector
    free_bytes: float  # on the fullest device so far


@dataclass(frozen=True, slots=True)
class _Extended:
    """A partial plan with one more stage, for every number of blocks that the stage may have (the first axis)."""

    partial: _Partial  # without its blocks, times and free bytes
    blocks: NDArray[np.int64]  # placed in total
    latency: Vector
    bottleneck: Vector
    free_bytes: Vector

    def plan(self, i: int) -> _Partial:
        return replace(
            self.partial, blocks=int(self.blocks[i]), latency=self.latency[i], bottleneck=self.bottleneck[i],
            free_bytes=float(self.free_bytes[i]),
        )  # fmt: skip


class _Space:
    """All plans of one SSM place; times are vectors over (draft plan, requests of a micro-batch)."""

    def __init__(self, problem: Problem, place: SsmPlace) -> None:
        self.problem, self.place = problem, place
        self.blocks = problem.llm.blocks
        self.pools = problem.pools(place)
        self.choices = choices(problem.entries_at(place), problem.tried_batches)
        keys = list(dict.fromkeys((choice.entry, choice.micro) for choice in self.choices))
        self.prices = [Prices(problem, place, *key) for key in keys]
        self.index = np.array([keys.index((choice.entry, choice.micro)) for choice in self.choices])
        self.counts = np.array([choice.micro_batches for choice in self.choices], np.float64)
        self.tokens = np.array([choice.entry.committed_tokens for choice in self.choices])
        self.batch = np.array([choice.batch for choice in self.choices], np.float64)
        self.every_stage = np.array([price.every_stage_us for price in self.prices])
        self.fixed = np.array([price.fixed_us for price in self.prices])
        self.floor = np.array([price.fixed_bottleneck_us for price in self.prices])
        self.table: dict[tuple[int, int, bool, bool], tuple[Vector, Vector, int]] = {}
        self.room: dict[tuple[int, int, bool, bool], tuple[int, int]] = {}
        self.hops: dict[tuple[int, int, int, bool], Vector] = {}

    def stage(self, kind: int, degree: int, first: bool, last: bool) -> tuple[Vector, Vector, int]:
        """(time of a block, time of the ends, most blocks)."""
        key = (kind, degree, first, last)
        if key not in self.table:
            block = np.array([price.unit_us(kind, degree, "block") for price in self.prices])
            ends = np.array([price.ends_us(kind, degree, first=first, last=last) for price in self.prices])
            cap = self.problem.most_blocks(kind, degree, self.place, first=first, last=last)
            self.table[key] = (block, ends, cap)
        return self.table[key]

    def free(self, kind: int, degree: int, blocks: NDArray[np.int64], first: bool, last: bool) -> Vector:
        """Bytes that a stage leaves free on its devices, for every number of blocks."""
        key = (kind, degree, first, last)
        if key not in self.room:
            self.room[key] = self.problem.free_bytes(kind, degree, self.place, first=first, last=last)
        room, per_block = self.room[key]
        return np.asarray(room - per_block * blocks, np.float64)

    def hop(self, kind: int, source: int, target: int, new: bool) -> Vector:
        key = (kind, source, target, new)
        if key not in self.hops:
            self.hops[key] = np.array([price.hop_us(kind, source, target, new_node=new) for price in self.prices])
        return self.hops[key]

    def slots(self, nodes: tuple[int, ...], pool: int, used: int) -> Iterator[tuple[int, int, int, bool]]:
        """(pool, devices used before, degree, on a new node) of every possible next stage."""
        starts = [(pool, used, False)] if pool >= 0 else []
        starts += [(k, 0, True) for k, free_pool in enumerate(self.pools) if nodes[k] < free_pool.count]
        for (k, taken, new), degree in itertools.product(starts, self.problem.legal_degrees):
            if taken + degree <= self.pools[k].devices:
                yield k, taken, degree, new

    def values(self, latency: Vector, bottleneck: Vector) -> Vector:
        """The objective of every choice, along the last axis."""
        period = np.maximum(latency[..., self.index], self.counts * bottleneck[..., self.index])
        per_request: Vector = period / self.tokens
        if self.problem.objective == "latency":
            return per_request
        if self.problem.objective == "goodput":
            per_request = np.where(per_request > self.problem.limit_us, math.inf, per_request)
        return per_request / self.batch

    def count(self) -> int:
        """The number of stage structures that fit."""
        known: dict[tuple[int, tuple[int, ...], int, int], int] = {}

        def count_from(done: int, nodes: tuple[int, ...], pool: int, used: int) -> int:
            key = (done, nodes, pool, used)
            if key not in known:
                total = 0
                for k, taken, degree, new in self.slots(nodes, pool, used):
                    after = _add(nodes, k) if new else nodes
                    kind, left = self.pools[k].kind, self.blocks - done
                    total += self.stage(kind, degree, done == 0, True)[2] >= left
                    most = min(self.stage(kind, degree, done == 0, False)[2], left - 1)
                    for blocks in range(1, most + 1):
                        total += count_from(done + blocks, after, k, taken + degree)
                known[key] = total
            return known[key]

        return count_from(0, (0,) * len(self.pools), -1, 0)

    def start(self) -> _Partial:
        free = self.problem.drafting_free_bytes(self.place)
        return _Partial(0, (0,) * len(self.pools), -1, 0, 0, self.fixed, self.floor, free)

    def extend(self, plan: _Partial, last: bool) -> Iterator[_Extended]:
        """Every possible next stage, with all its numbers of blocks."""
        for k, taken, degree, new in self.slots(plan.nodes, plan.pool, plan.used):
            kind, left = self.pools[k].kind, self.blocks - plan.blocks
            first = plan.blocks == 0
            block, ends, cap = self.stage(kind, degree, first, last)
            least, most = (left, min(cap, left)) if last else (1, min(cap, left - 1))
            if most < least:
                continue
            blocks = np.arange(least, most + 1)
            time = blocks[:, None] * block + ends
            hop = np.zeros_like(block) if first else self.hop(kind, plan.degree, degree, new)
            nodes = _add(plan.nodes, k) if new else plan.nodes
            latency = plan.latency + time + hop
            bottleneck = np.maximum(np.maximum(plan.bottleneck, hop), time + self.every_stage)
            free = np.minimum(plan.free_bytes, self.free(kind, degree, blocks, first, last))
            partial = replace(plan, nodes=nodes, pool=k, used=taken + degree, degree=degree)
            yield _Extended(partial, plan.blocks + blocks, latency, bottleneck, free)

    def enumerate(self) -> list[tuple[float, float]]:
        """(lowest value, free bytes on the fullest device) of every plan, by depth-first enumeration."""
        plans: list[tuple[float, float]] = []
        stack = [self.start()]
        while stack:
            plan = stack.pop()
            for extended in self.extend(plan, last=True):
                plans.append(
                    (float(self.values(extended.latency, extended.bottleneck).min()), float(extended.free_bytes[0]))
                )
            for extended in self.extend(plan, last=False):
                stack.extend(extended.plan(i) for i in range(len(extended.blocks)))
        return plans

    @cached_property
    def least(self) -> tuple[Vector, Vector, Vector]:
        """The least (time of a block, device time of a block, time of the last stage's ends) over kinds and degrees."""
        kinds = {pool.kind for pool in self.pools}
        fit = [
            (self.stage(kind, degree, False, False)[0], degree)
            for kind in kinds
            for degree in self.problem.legal_degrees
            if any(pool.kind == kind and degree <= pool.devices for pool in self.pools)
        ]
        ends = [self.stage(k, d, False, True)[1] for k in kinds for d in self.problem.legal_degrees]
        return (
            np.min([block for block, _ in fit], axis=0),
            np.min([block * degree for block, degree in fit], axis=0),
            np.min(ends, axis=0),
        )

    def bound(self, extended: _Extended) -> Vector:
        """A lower bound of every completion: the fastest blocks, shared evenly by the remaining devices."""
        block, work, ends = self.least
        partial, bottleneck = extended.partial, extended.bottleneck
        left = (self.blocks - extended.blocks)[:, None]
        devices = self.pools[partial.pool].devices - partial.used if partial.pool >= 0 else 0
        devices += sum(pool.devices * (pool.count - n) for pool, n in zip(self.pools, partial.nodes, strict=True))
        busy = np.maximum(bottleneck, left * work / max(1, devices) + self.every_stage) if devices else np.inf
        busy = np.maximum(bottleneck, busy)
        rest: Vector = self.values(extended.latency + left * block + ends, busy).min(axis=1)
        return rest


def _add(nodes: tuple[int, ...], k: int) -> tuple[int, ...]:
    return (*nodes[:k], nodes[k] + 1, *nodes[k + 1 :])


def prove(problem: Problem, incumbent_us: float, *, expansions: int = EXPANSIONS) -> Certificate:
    """Compare ``incumbent_us`` with the lowest value of the space or, if that is too large, with a lower bound."""
    spaces = [_Space(problem, place) for place in problem.places()]
    plans = sum(space.count() for space in spaces)
    choices = sum(len(space.choices) for space in spaces)
    if plans <= ENUMERATED:
        results = [plan for space in spaces for plan in space.enumerate()]
        assert len(results) == plans, f"counted {plans} plans, enumerated {len(results)}"
        best = min((value for value, _ in results), default=math.inf)
        free = max((free for value, free in results if value <= best * TIE), default=0.0)
        return Certificate("enumeration", plans, choices, best, best, plans, int(free))
    return _branch_and_bound(spaces, plans, choices, incumbent_us, expansions)


def _branch_and_bound(
    spaces: list[_Space], plans: int, choices: int, incumbent_us: float, expansions: int
) -> Certificate:
    """Best first: the least promising plans are never examined; the head of the queue bounds them all."""
    best, serial = incumbent_us, itertools.count()
    queue = [(0.0, next(serial), space, space.start()) for space in spaces]
    heapq.heapify(queue)
    examined = 0
    while queue and examined < expansions and queue[0][0] < best:
        _, _, space, plan = heapq.heappop(queue)
        examined += 1
        for extended in space.extend(plan, last=True):
            best = min(best, float(space.values(extended.latency, extended.bottleneck).min()))
        for extended in space.extend(plan, last=False):
            bounds = space.bound(extended)
            for i in np.flatnonzero(bounds < best):
                heapq.heappush(queue, (float(bounds[i]), next(serial), space, extended.plan(int(i))))
    bound = min(best, queue[0][0]) if queue else best
    return Certificate("branch and bound", plans, choices, best, bound, examined)

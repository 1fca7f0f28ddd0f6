"""The search and the prover count equal nodes; here every node is told apart, and plans are built device by device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from planning import random_problem

from flexspec.compiler.artifact.ssm_place import EveryDevice, NoSsm, SeparateDevices, SsmPlace, place_named
from flexspec.compiler.planner.plan_choice import least_free_bytes
from flexspec.compiler.planner.prove import prove
from flexspec.compiler.planner.search import search
from flexspec.compiler.prices.problem import Problem, micro_batch_counts
from flexspec.compiler.prices.rounds import Cut, Prices, round_cost, value_us
from flexspec.errors import PlanError

MOST_DEVICES, MOST_BLOCKS = 4, 4


def hosts(problem: Problem) -> Iterator[tuple[SsmPlace, list[int]]]:
    """SSM places, and the devices that each node has left for stages."""
    kinds = problem.machine.node_kinds()
    room = [kind.devices for kind in kinds]
    yield NoSsm(), room
    if not problem.ssms:
        return
    for name in ("first", "last", *(["all"] if problem.machine.devices > 1 else [])):
        yield place_named(name), room
    for node, kind in enumerate(kinds):
        left = kind.devices - len(problem.ssms)
        if left >= 0 and sum(room) > len(problem.ssms):
            place = SeparateDevices(next(i for i, each in enumerate(problem.machine.kinds) if each is kind))
            yield place, [*room[:node], left, *room[node + 1 :]]


def stage_lists(problem: Problem, room: list[int], left: int, at: int, gone: frozenset[int]) -> Iterator[list[Cut]]:
    """All lists of stages for ``left`` blocks; ``at`` is the present node (-1: none), ``gone`` those already left."""
    kinds = problem.machine.node_kinds()
    for node, degree in itertools.product(range(len(kinds)), problem.legal_degrees):
        if node in gone or degree > room[node]:
            continue
        kind = next(i for i, each in enumerate(problem.machine.kinds) if each is kinds[node])
        after = [*room[:node], room[node] - degree, *room[node + 1 :]]
        for blocks in range(1, left + 1):
            cut = Cut(kind, degree, blocks, at not in (-1, node))
            if blocks == left:
                yield [cut]
                continue
            behind = gone | {at} if at not in (-1, node) else gone
            for rest in stage_lists(problem, after, left - blocks, node, behind):
                yield [cut, *rest]


def best_of_all(problem: Problem) -> tuple[float, int]:
    """(least value, plans) over every device, draft plan, batch and number of micro-batches."""
    batches = (problem.requests,) if problem.objective == "latency" else problem.batches
    best, plans = math.inf, 0
    for place, room in hosts(problem):
        ways = [(e, b, m) for e in problem.entries_at(place) for b in batches for m in micro_batch_counts(b)]
        prices = {(e, -(-b // m)): Prices(problem, place, e, -(-b // m)) for e, b, m in ways}
        for cuts in stage_lists(problem, room, problem.llm.blocks, -1, frozenset()):
            if least_free_bytes(problem, place, cuts) < 0 or not drafting_fits(problem, place):
                continue
            plans += 1
            costs = {key: round_cost(each, cuts) for key, each in prices.items()}
            for entry, batch, count in ways:
                period = costs[entry, -(-batch // count)].period_us(count)
                best = min(best, value_us(problem, entry, batch, period))
    return best, plans


def drafting_fits(problem: Problem, place: SsmPlace) -> bool:
    """With "all", devices without a stage draft too."""
    if place != EveryDevice():
        return True
    return all(
        sum(problem.ssm_bytes_at(place)) <= kind.device.memory_bytes.effective - kind.device.reserve_bytes.effective
        for kind in problem.machine.kinds
    )


@pytest.mark.slow(reason="plans are built device by device")
def test_nothing_is_lost_by_counting() -> None:
    tried = found = several = 0
    for seed in range(160):
        problem = random_problem(seed)
        if problem.machine.devices > MOST_DEVICES or problem.llm.blocks > MOST_BLOCKS:
            continue
        tried += 1
        value, plans = best_of_all(problem)
        try:
            best = search(problem)[0].value_us
            found += 1
        except PlanError:
            best = math.inf
        proof = prove(problem, best)
        assert math.isclose(best, value, rel_tol=1e-9) or best == value, seed
        assert proof.best_us == best or math.isclose(proof.best_us, best, rel_tol=1e-9), seed
        several += plans > proof.plans  # equal nodes: several of these plans are one of the prover's
        assert plans >= proof.plans, seed
    assert tried > 20 and found > 12 and several > 4, (tried, found, several)

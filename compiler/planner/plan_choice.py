"""Turns a candidate of the search into a plan: ranks and devices, the ladder over batch sizes, predicted figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flexspec.compiler.artifact.plan import Plan, Stage
from flexspec.compiler.artifact.ssm_place import SsmPlace
from flexspec.compiler.planner.prove import Certificate
from flexspec.compiler.planner.search import Candidate
from flexspec.compiler.prices.acceptance_profile import DraftEntry
from flexspec.compiler.prices.memory import RankBytes
from flexspec.compiler.prices.problem import Choice, Pool, Problem, choices
from flexspec.compiler.prices.rounds import Cut, PricedChoice, cost_of, value_us
from flexspec.draft_plan import DraftLadder, DraftPlan


def ladder(
    problem: Problem,
    place: SsmPlace,
    cuts: Sequence[Cut],
    *,
    draft: DraftPlan | None = None,
    micro_batches: int | None = None,
) -> list[PricedChoice]:
    """For every batch size, the draft plan (possibly "off") and micro-batch count with the least time per token.

    ``draft`` and ``micro_batches`` fix either of them.
    """
    entries = [entry for entry in problem.offered_at(place) if draft in (None, entry.draft)]
    rungs = []
    for batch in problem.batches:
        count = min(micro_batches, batch) if micro_batches else None
        priced = [_priced(problem, place, choice, cuts) for choice in choices(entries, (batch,), count)]
        rungs.append(min(priced, key=lambda choice: choice.per_token_us))
    return rungs


def _priced(problem: Problem, place: SsmPlace, choice: Choice, cuts: Sequence[Cut]) -> PricedChoice:
    period_us = cost_of(problem, place, choice, cuts).period_us(choice.micro_batches)
    return PricedChoice(choice.entry, choice.batch, choice.micro_batches, period_us)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which devices run what."""

    stages: tuple[tuple[int, ...], ...]  # devices of every stage
    ssms: tuple[tuple[int, ...], ...]  # devices of every SSM; several: data parallel


def place_devices(problem: Problem, place: SsmPlace, cuts: Sequence[Cut]) -> Layout:
    """Assign devices to stages, node by node; separate devices of SSMs are the last of their kind."""
    free = _free_nodes(problem, place)
    stages: list[tuple[int, ...]] = []
    node: list[int] = []
    for run in _runs(cuts):
        need = sum(cut.degree for cut in run)
        node = min((devices for devices in free[run[0].kind] if len(devices) >= need), key=len)
        free[run[0].kind].remove(node)
        for cut in run:
            stages.append(tuple(node[: cut.degree]))
            node = node[cut.degree :]
    return Layout(tuple(stages), ssm_devices(problem, place, stages))


def _runs(cuts: Sequence[Cut]) -> list[list[Cut]]:
    """The stages, grouped by node."""
    runs: list[list[Cut]] = []
    for i, cut in enumerate(cuts):
        if i == 0 or cut.new_node:
            runs.append([])
        runs[-1].append(cut)
    return runs


def _free_nodes(problem: Problem, place: SsmPlace) -> dict[int, list[list[int]]]:
    """By kind, the devices of every node that stages may use."""
    free: dict[int, list[list[int]]] = {}
    first = 0
    for number, kind in enumerate(problem.machine.kinds):
        nodes = [list(range(first + i * kind.devices, first + (i + 1) * kind.devices)) for i in range(kind.count)]
        first += kind.devices * kind.count
        nodes[-1] = nodes[-1][: kind.devices - place.reserved(number, len(problem.ssms))]
        free[number] = nodes
    return free


def ssm_devices(problem: Problem, place: SsmPlace, stages: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Devices of every SSM, after those of stages are assigned."""
    ssms, end = len(problem.ssms), 0
    separate: list[int] = []
    for number, kind in enumerate(problem.machine.kinds):
        end += kind.devices * kind.count
        separate += range(end - place.reserved(number, ssms), end)
    return place.assign(stages, ssms, separate=separate, every=tuple(range(problem.machine.devices)))


def make_plan(
    problem: Problem,
    candidate: Candidate,
    certificate: Certificate | None = None,
    origin: str = "search",
    layout: Layout | None = None,
    rungs: Sequence[PricedChoice] = (),
) -> Plan:
    """The plan of a candidate. ``layout`` and ``rungs`` are computed unless passed.

    Ranks are numbered by stage; ranks that only draft come last.
    """
    layout = layout or place_devices(problem, candidate.place, candidate.cuts)
    devices = [device for stage in layout.stages for device in stage]
    devices += [device for ssm in layout.ssms for device in ssm if device not in devices]
    devices = list(dict.fromkeys(devices))
    rank = {device: i for i, device in enumerate(devices)}
    stages, first = [], 0
    for cut, stage_devices in zip(candidate.cuts, layout.stages, strict=True):
        stages.append(Stage(first, first + cut.blocks, tuple(rank[device] for device in stage_devices)))
        first += cut.blocks
    rungs = rungs or ladder(problem, candidate.place, candidate.cuts)
    return Plan(
        stages=tuple(stages),
        ssm_ranks=tuple(tuple(rank[device] for device in ssm) for ssm in layout.ssms),
        ladder=DraftLadder(tuple((rung.batch, rung.entry.draft) for rung in rungs)),
        origin=origin,
        devices=tuple(devices),
        micro_batches=tuple(rung.micro_batches for rung in rungs),
        ssm_place=candidate.place.name,
        machine=problem.machine.name,
        predicted=predicted_figures(candidate),
        certificate=tuple(sorted(certificate.to_json().items())) if certificate else (),
    )


def predicted_figures(candidate: Candidate) -> tuple[tuple[str, float], ...]:
    """The figures of a plan file."""
    figures = {
        "period_us": candidate.period_us,
        "committed_tokens": candidate.entry.committed_tokens,
        "per_token_us": candidate.per_token_us,
        "tokens_per_s": candidate.tokens_per_s,
    }
    return tuple(sorted(figures.items()))


def best_choice(
    problem: Problem,
    place: SsmPlace,
    cuts: tuple[Cut, ...],
    entries: Sequence[DraftEntry] = (),
    batch: int | None = None,
    micro_batches: int | None = None,
) -> Candidate | None:
    """The best choice for ``cuts``; None if none meets the limit. The other arguments narrow what is tried."""
    free_bytes = least_free_bytes(problem, place, cuts)
    best: Candidate | None = None
    batches = (batch,) if batch else problem.tried_batches
    for choice in choices(entries or problem.entries_at(place), batches, micro_batches):
        period = cost_of(problem, place, choice, cuts).period_us(choice.micro_batches)
        value = value_us(problem, choice.entry, choice.batch, period)
        if not math.isinf(value) and (best is None or value < best.value_us):
            best = Candidate(
                choice.entry, choice.batch, choice.micro_batches, period, value, place, cuts, free_bytes
            )  # fmt: skip
    return best


def even_cuts(blocks: int, stages: int) -> list[int]:
    """Blocks of every stage when they are divided evenly; the first stages take the remainder."""
    return [blocks // stages + (i < blocks % stages) for i in range(stages)]


def uniform_plans(problem: Problem) -> list[Candidate]:
    """Plans as people write them by hand (Megatron style): one degree, equal stages, nodes in order."""
    plans: list[Candidate] = []
    for place in problem.places():
        for degree in problem.legal_degrees:
            slots = _slots(problem.pools(place), degree)
            for count in range(1, min(len(slots), problem.llm.blocks) + 1):
                cuts = tuple(
                    Cut(kind, degree, blocks, new and i > 0)
                    for i, ((kind, new), blocks) in enumerate(
                        zip(slots[:count], even_cuts(problem.llm.blocks, count), strict=True)
                    )
                )
                if least_free_bytes(problem, place, cuts) >= 0:
                    plan = best_choice(problem, place, cuts)
                    plans += [plan] if plan else []
    return sorted(plans, key=lambda plan: plan.value_us)


def _slots(pools: Sequence[Pool], degree: int) -> list[tuple[int, bool]]:
    """(kind, on a new node) of every slot for a stage of this degree, in machine order."""
    return [
        (pool.kind, i == 0)
        for pool in pools
        for _ in range(pool.count)
        for i in range(pool.devices // degree)
    ]  # fmt: skip


def plan_bytes(problem: Problem, place: SsmPlace, cuts: Sequence[Cut]) -> list[RankBytes]:
    """Memory of the largest rank of every stage."""
    final = len(cuts) - 1
    return [
        problem.stage_bytes(cut.kind, cut.degree, cut.blocks, place, first=i == 0, last=i == final)
        for i, cut in enumerate(cuts)
    ]


def least_free_bytes(problem: Problem, place: SsmPlace, cuts: Sequence[Cut]) -> float:
    """Free bytes on the fullest device; negative if the plan does not fit."""
    return min([problem.drafting_free_bytes(place), *(memory.free for memory in plan_bytes(problem, place, cuts))])


def drafting_bytes(problem: Problem, place: SsmPlace, layout: Layout) -> dict[int, RankBytes]:
    """Memory that SSMs take on every device that drafts, whether or not it also has a stage."""
    drafting: dict[int, RankBytes] = {}
    for ssm_bytes, devices in zip(problem.ssm_bytes_at(place), layout.ssms, strict=False):
        for device in devices:
            kind = problem.kind(problem.machine.node_kind(problem.machine.device_node(device))).device
            before = drafting[device].ssm if device in drafting else 0
            reserve, limit = int(kind.reserve_bytes.effective), int(kind.memory_bytes.effective)
            drafting[device] = RankBytes(0, 0, 0, 0, 0, before + ssm_bytes, reserve, limit)
    return drafting

"""From what the search found to a plan: ranks and their devices, the ladder over batch sizes, predicted figures."""

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
    """For each batch size the draft plan (possibly "off") and micro-batch count with the least time per token.

    ``draft`` and ``micro_batches`` fix the one or the other.
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
    """Devices of each stage, and of each SSM (several: data parallel)."""

    stages: tuple[tuple[int, ...], ...]
    ssms: tuple[tuple[int, ...], ...]


def place_devices(problem: Problem, place: SsmPlace, cuts: Sequence[Cut]) -> Layout:
    """Give every stage devices of the machine, node by node; separate devices of SSMs are the last of their kind."""
    free = _free_nodes(problem, place)
    stages: list[tuple[int, ...]] = []
    node: list[int] = []
    for run in _runs(cuts):
        need = sum(cut.degree for cut in run)
        node = min((each for each in free[run[0].kind] if len(each) >= need), key=len)
        free[run[0].kind].remove(node)
        for cut in run:
            stages.append(tuple(node[: cut.degree]))
            node = node[cut.degree :]
    return Layout(tuple(stages), ssm_devices(problem, place, stages))


def _runs(cuts: Sequence[Cut]) -> list[list[Cut]]:
    """Stages that share a node, together."""
    runs: list[list[Cut]] = []
    for i, cut in enumerate(cuts):
        if i == 0 or cut.new_node:
            runs.append([])
        runs[-1].append(cut)
    return runs


def _free_nodes(problem: Problem, place: SsmPlace) -> dict[int, list[list[int]]]:
    """Devices of every node that stages may use, by kind."""
    free: dict[int, list[list[int]]] = {}
    first = 0
    for number, kind in enumerate(problem.machine.kinds):
        nodes = [list(range(first + i * kind.devices, first + (i + 1) * kind.devices)) for i in range(kind.count)]
        first += kind.devices * kind.count
        nodes[-1] = nodes[-1][: kind.devices - place.reserved(number, len(problem.ssms))]
        free[number] = nodes
    return free


def ssm_devices(problem: Problem, place: SsmPlace, stages: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Devices of each SSM when stages have theirs."""
    ssms, end = len(problem.ssms), 0
    separate: list[int] = []
    for number, kind in enumerate(problem.machine.kinds):
        end += kind.devices * kind.count
        separate += range(end - place.reserved(number, ssms), end)
    return place.assign(stages, ssms, separate=separate, every=tuple(range(problem.machine.devices)))


def make_plan(
    problem: Problem,
    found: Candidate,
    certificate: Certificate | None = None,
    origin: str = "search",
    layout: Layout | None = None,
    rungs: Sequence[PricedChoice] = (),
) -> Plan:
    """The plan of a candidate, on devices and with a ladder of our own if none are given.

    Ranks are numbered by stage, then come those that only draft.
    """
    layout = layout or place_devices(problem, found.place, found.cuts)
    devices = [device for stage in layout.stages for device in stage]
    devices += [device for ssm in layout.ssms for device in ssm if device not in devices]
    devices = list(dict.fromkeys(devices))
    rank = {device: i for i, device in enumerate(devices)}
    stages, first = [], 0
    for cut, stage_devices in zip(found.cuts, layout.stages, strict=True):
        stages.append(Stage(first, first + cut.blocks, tuple(rank[device] for device in stage_devices)))
        first += cut.blocks
    rungs = rungs or ladder(problem, found.place, found.cuts)
    return Plan(
        stages=tuple(stages),
        ssm_ranks=tuple(tuple(rank[device] for device in ssm) for ssm in layout.ssms),
        ladder=DraftLadder(tuple((rung.batch, rung.entry.draft) for rung in rungs)),
        origin=origin,
        devices=tuple(devices),
        micro_batches=tuple(rung.micro_batches for rung in rungs),
        ssm_place=found.place.name,
        machine=problem.machine.name,
        predicted=predicted_figures(found),
        certificate=tuple(sorted(certificate.to_json().items())) if certificate else (),
    )


def predicted_figures(found: Candidate) -> tuple[tuple[str, float], ...]:
    """What a plan file says of its price."""
    figures = {
        "period_us": found.period_us,
        "committed_tokens": found.entry.committed_tokens,
        "per_token_us": found.per_token_us,
        "tokens_per_s": found.tokens_per_s,
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
    """The best way to run given stages, as far as it is not given too; None if none meets the limit."""
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
    """Blocks of each stage when they are shared out evenly, the first ones taking what is left over."""
    return [blocks // stages + (i < blocks % stages) for i in range(stages)]


def uniform_plans(problem: Problem) -> list[Candidate]:
    """What people write by hand (Megatron style): one degree, equal stages, nodes in order, any SSM place."""
    found: list[Candidate] = []
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
                    each = best_choice(problem, place, cuts)
                    found += [each] if each else []
    return sorted(found, key=lambda each: each.value_us)


def _slots(pools: Sequence[Pool], degree: int) -> list[tuple[int, bool]]:
    """(kind, on a new node) of every place for a stage of this degree, in the order of the machine."""
    return [
        (pool.kind, i == 0)
        for pool in pools
        for _ in range(pool.count)
        for i in range(pool.devices // degree)
    ]  # fmt: skip


def plan_bytes(problem: Problem, place: SsmPlace, cuts: Sequence[Cut]) -> list[RankBytes]:
    """Memory of the largest rank of each stage."""
    final = len(cuts) - 1
    return [
        problem.stage_bytes(cut.kind, cut.degree, cut.blocks, place, first=i == 0, last=i == final)
        for i, cut in enumerate(cuts)
    ]


def least_free_bytes(problem: Problem, place: SsmPlace, cuts: Sequence[Cut]) -> float:
    """Bytes free on the fullest device; below 0 the plan does not fit."""
    return min([problem.drafting_free_bytes(place), *(held.free for held in plan_bytes(problem, place, cuts))])


def drafting_bytes(problem: Problem, place: SsmPlace, layout: Layout) -> dict[int, RankBytes]:
    """What SSMs take on each device that drafts, whether a stage is there too or not."""
    drafting: dict[int, RankBytes] = {}
    for bytes_here, devices in zip(problem.ssm_bytes_at(place), layout.ssms, strict=False):
        for device in devices:
            kind = problem.kind(problem.machine.node_kind(problem.machine.device_node(device))).device
            before = drafting[device].ssm if device in drafting else 0
            reserve, limit = int(kind.reserve_bytes.effective), int(kind.memory_bytes.effective)
            drafting[device] = RankBytes(0, 0, 0, 0, 0, before + bytes_here, reserve, limit)
    return drafting

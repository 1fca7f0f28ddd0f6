"""Plan files: JSON from ``flexspec plan -o``, or hand-written TOML; for ``compile --plan`` and ``plan --score``.

Owns reading them, converting one form to the other, and the check that a plan suits a model. Prices are not used here
(score_plan.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexspec.checked_table import Table, read_table
from flexspec.compiler.artifact.plan import (
    MAX_BLOCKS,
    MAX_MICRO_BATCHES,
    MAX_RANKS,
    Plan,
    Stage,
    check_blocks,
    check_plan,
    plan_from_json,
)
from flexspec.compiler.artifact.ssm_place import (
    PLACES,
    FirstStage,
    NoSsm,
    SsmPlace,
    place_named,
    place_of_ranks,
)
from flexspec.draft_plan import OPEN_BATCH, DraftLadder, DraftPlan
from flexspec.errors import PlanError, RequestError

FIX = "correct the plan file"


@dataclass(frozen=True, slots=True)
class HandPlan:
    """A hand-written plan. The reader chooses what it omits (None)."""

    source: str  # the file
    stages: tuple[tuple[int, tuple[int, ...]], ...]  # (blocks, devices)
    place: SsmPlace | None = None
    ssm_devices: tuple[int, ...] = ()  # one per SSM, if they are on separate devices
    draft: DraftPlan | None = None
    batch: int | None = None
    micro_batches: int | None = None

    @property
    def blocks(self) -> int:
        return sum(blocks for blocks, _ in self.stages)


def wrong(found: str, expected: str) -> PlanError:
    """The error for an invalid plan file."""
    return PlanError(found, expected, FIX)


def read_plan(path: Path, ssms: int, draft: DraftPlan) -> Plan:
    """The plan of a file; ``draft`` is for a TOML file that names no draft plan. Raises PlanError."""
    plan = _read(path)
    return plan if isinstance(plan, Plan) else _plan_of(plan, ssms, draft)


def read_hand_plan(path: Path, requests: int) -> HandPlan:
    """The plan of a file for ``requests`` concurrent requests. Raises PlanError."""
    plan = _read(path)
    return plan if isinstance(plan, HandPlan) else _hand_plan_of(str(path), plan, requests)


def _read(path: Path) -> Plan | HandPlan:
    table = read_table(path, "a plan: JSON (flexspec plan -o) or TOML", wrong)
    return plan_from_json(table.body, str(path), wrong) if path.suffix == ".json" else _read_hand(table, str(path))


def _read_hand(table: Table, source: str) -> HandPlan:
    stages: list[tuple[int, tuple[int, ...]]] = []
    taken: set[int] = set()
    table.only(("stages",), ("ssm", "ssm_devices", "draft", "batch", "micro_batches"))
    for part in table.array("stages"):
        part.only(("blocks", "devices"))
        blocks, devices = part.count("blocks", MAX_BLOCKS), part.counts("devices", MAX_RANKS)
        part.done()
        if not devices:
            raise part.error("devices", "[]", "at least one device")
        _take(part, "devices", devices, taken)
        stages.append((blocks, devices))
    ssm_devices = table.counts("ssm_devices", MAX_RANKS) if table.has("ssm_devices") else ()
    _take(table, "ssm_devices", ssm_devices, taken)
    name = table.text("ssm") if table.has("ssm") else ""
    if name and name not in PLACES:
        raise table.error("ssm", f"{name!r}", f"one of {', '.join(PLACES)}")
    place = place_named(name) if name else None
    if (place is not None and place.separate) != bool(ssm_devices):
        raise table.error(
            "ssm_devices", f"{list(ssm_devices)} with ssm = {name!r}", 'one device per SSM with ssm = "own"'
        )
    plan = HandPlan(
        source,
        tuple(stages),
        place,
        ssm_devices,
        _draft(table) if table.has("draft") else None,
        table.count("batch", OPEN_BATCH) if table.has("batch") else None,
        table.count("micro_batches", MAX_MICRO_BATCHES) if table.has("micro_batches") else None,
    )
    table.done()
    return plan


def _draft(table: Table) -> DraftPlan:
    text = table.text("draft")
    try:
        return DraftPlan.parse(text)
    except RequestError as error:
        raise table.error("draft", f"{text!r}: {error.found}", error.expected) from None


def _take(part: Table, key: str, devices: tuple[int, ...], taken: set[int]) -> None:
    """Add the devices of a stage or an SSM to ``taken``, which must not contain them yet."""
    for device in devices:
        if device in taken:
            raise part.error(key, f"device {device} again, in {list(devices)}", "each device only once")
        taken.add(device)


def _plan_of(hand: HandPlan, ssms: int, draft: DraftPlan) -> Plan:
    """Ranks are numbered in the order in which the stages list their devices; those of SSMs come last."""
    stages: list[Stage] = []
    devices: list[int] = []
    for blocks, stage_devices in hand.stages:
        first = stages[-1].end_block if stages else 0
        stages.append(Stage(first, first + blocks, tuple(range(len(devices), len(devices) + len(stage_devices)))))
        devices += stage_devices
    place = hand.place or (FirstStage() if ssms else NoSsm())
    separate = range(len(devices), len(devices) + len(hand.ssm_devices))
    ssm_ranks = place.assign(
        [stage.ranks for stage in stages], ssms, separate=separate, every=tuple(range(len(devices)))
    )
    return Plan(
        tuple(stages),
        ssm_ranks,
        DraftLadder.of(hand.draft or draft),
        "hand",
        (*devices, *hand.ssm_devices),
        (hand.micro_batches,) if hand.micro_batches else (),
        place.name if ssm_ranks else "",
    )


def _hand_plan_of(source: str, plan: Plan, requests: int) -> HandPlan:
    """Ranks become devices; draft plan and micro-batches are the ladder's for this batch."""

    def devices(ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(plan.devices[rank] if plan.devices else rank for rank in ranks)

    place = _place_of(plan)
    return HandPlan(
        source,
        tuple((stage.end_block - stage.first_block, devices(stage.ranks)) for stage in plan.stages),
        place,
        tuple(devices(ranks)[0] for ranks in plan.ssm_ranks) if place.separate else (),
        plan.ladder.for_batch(requests),
        None,
        min(plan.micro_batches_for(requests), requests),
    )


def _place_of(plan: Plan) -> SsmPlace:
    """The SSM place of a plan, derived from the ranks if the plan does not name it."""
    if plan.ssm_place:
        return place_named(plan.ssm_place)
    return place_of_ranks([stage.ranks for stage in plan.stages], plan.ssm_ranks)


def check_runnable(plan: Plan, blocks: int, ssms: int) -> None:
    """Raise PlanError for a plan that no ranks could run, or that was not made for this model and its SSMs."""
    check_plan(plan, _invalid)
    check_blocks(plan.stages[-1].end_block, blocks, _invalid)
    if all(0 not in stage.ranks for stage in plan.stages):
        raise _invalid("stages", f"ranks {[list(stage.ranks) for stage in plan.stages]}", "rank 0 in one of them")
    if len(plan.ssm_ranks) != ssms:
        raise wrong(f"a plan for {len(plan.ssm_ranks)} SSMs", f"{ssms}, as many as --ssm names")


def _invalid(key: str, found: str, expected: str) -> PlanError:
    return wrong(f"plan: {key}: {found}", expected)

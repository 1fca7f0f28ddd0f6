"""The parallel plan of an artifact: stages with their TP degree and ranks, where each SSM lives, the tree ladder.

One rank is a plan with one stage of degree 1, not a special case. Owns the record, its JSON form and the rules that
every plan obeys, searched or hand-written. What a search adds (devices, prediction, certificate) is optional, and
absent from the file if empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from flexspec.checked_table import Fail, Table, show
from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.manifest import damaged
from flexspec.compiler.artifact.ssm_place import PLACES, place_named
from flexspec.draft_plan import OPEN_BATCH, DraftLadder, DraftPlan
from flexspec.errors import FlexspecError, RequestError

MAX_BLOCKS = 65_536
MAX_RANKS = 4096
MAX_MICRO_BATCHES = 16

Invalid = Callable[[str, str, str], FlexspecError]  # (key of the plan, found, expected) -> the caller's error


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: a range of blocks, every matrix of which is split over its ranks."""

    first_block: int
    end_block: int  # exclusive
    ranks: tuple[int, ...]  # as many as the TP degree

    @property
    def degree(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank runs, and with which draft plan. Nothing is checked here: see :func:`check_plan`."""

    stages: tuple[Stage, ...]
    ssm_ranks: tuple[tuple[int, ...], ...]  # the ranks that run SSM i; several: data parallel
    ladder: DraftLadder  # the draft plan of every batch size
    origin: str  # "default", "search", "hand"
    devices: tuple[int, ...] = ()  # the machine's device of each rank; empty: rank r is device r
    micro_batches: tuple[int, ...] = ()  # in flight, by rung of the ladder; empty: one
    ssm_place: str = ""  # a name of ssm_place.PLACES; empty: not recorded
    machine: str = ""
    predicted: tuple[tuple[str, float], ...] = ()  # figures of the cost model
    certificate: tuple[tuple[str, Any], ...] = ()  # of planner/prove.py

    def micro_batches_for(self, batch: int) -> int:
        """Micro-batches in flight for this many requests; a plan's last number holds for all larger batches."""
        if not self.micro_batches:
            return 1
        return self.micro_batches[min(self.ladder.rung_of(batch), len(self.micro_batches) - 1)]

    def to_json(self) -> dict[str, Any]:
        body = {field.name: getattr(self, field.name) for field in fields(self)}
        body["stages"] = [asdict(stage) for stage in self.stages]
        body["ladder"] = [[batch, str(draft)] for batch, draft in self.ladder.rungs]
        for name in ("predicted", "certificate"):
            body[name] = dict(body[name])
        return {name: value for name, value in body.items() if name in _REQUIRED or value}


_REQUIRED = ("stages", "ssm_ranks", "ladder", "origin")
_SSM_RANKS = "for each SSM a list of the ranks that run it, each once"


def single_rank(blocks: int, ssms: int, draft: DraftPlan) -> Plan:
    """Everything on rank 0."""
    return Plan((Stage(0, blocks, (0,)),), ((0,),) * ssms, DraftLadder.of(draft), "default")


def check_stages(stages: Sequence[Stage], invalid: Invalid) -> None:
    """Raise ``invalid``'s error unless stages follow one another without gaps and no rank is in two of them."""
    end_block = 0
    assigned: set[int] = set()
    for number, stage in enumerate(stages):
        key, ranks = f"stages[{number}]", set(stage.ranks)
        if stage.first_block != end_block:
            expected = f"{end_block}, where the stage before ends" if number else "0"
            raise invalid(f"{key}.first_block", f"{stage.first_block}", expected)
        if stage.end_block <= stage.first_block:
            raise invalid(f"{key}.end_block", f"{stage.end_block}", f"more than first_block, {stage.first_block}")
        if not ranks or len(ranks) < len(stage.ranks) or ranks & assigned or min(ranks) < 0:
            expected = "at least one rank, each in one stage only and listed once"
            raise invalid(f"{key}.ranks", show(list(stage.ranks)), expected)
        end_block = stage.end_block
        assigned |= ranks


def check_blocks(planned: int, blocks: int, invalid: Invalid) -> None:
    """Raise ``invalid``'s error unless the stages of a plan have as many blocks as the model."""
    if planned != blocks:
        raise invalid("stages", f"{planned} blocks", f"{blocks}, the model's")


def check_plan(plan: Plan, invalid: Invalid) -> None:
    """Raise ``invalid``'s error for a plan that no ranks could run, whatever the model."""
    check_stages(plan.stages, invalid)
    for ranks in plan.ssm_ranks:
        if not ranks or len(set(ranks)) < len(ranks):
            raise invalid("ssm_ranks", show(list(ranks)), _SSM_RANKS)
    used = {rank for ranks in (*(stage.ranks for stage in plan.stages), *plan.ssm_ranks) for rank in ranks}
    if sorted(used) != list(range(len(used))):
        raise invalid("stages", f"ranks {sorted(used)}", f"{len(used)} ranks, from 0 to {len(used) - 1}")
    if plan.devices and (len(plan.devices) != len(used) or len(set(plan.devices)) < len(plan.devices)):
        expected = f"one device for each of {len(used)} ranks, each device once"
        raise invalid("devices", show(list(plan.devices)), expected)
    _check_micro_batches(plan.micro_batches, plan.ladder, invalid)
    stage_ranks = [stage.ranks for stage in plan.stages]
    if plan.ssm_place and not place_named(plan.ssm_place).agrees(stage_ranks, plan.ssm_ranks):
        found = f"{plan.ssm_place!r} with ssm_ranks {show(list(plan.ssm_ranks))}"
        raise invalid("ssm_place", found, "a place that agrees with them")


def _check_micro_batches(counts: Sequence[int], ladder: DraftLadder, invalid: Invalid) -> None:
    """One count per rung of the ladder, at most its batch; or none at all."""
    rungs = ladder.rungs
    if not counts:
        return
    if len(counts) != len(rungs) or any(
        not 1 <= count <= min(batch, MAX_MICRO_BATCHES) for count, (batch, _) in zip(counts, rungs, strict=True)
    ):
        expected = f"one count for each of the ladder's {len(rungs)} batches, no larger than the batch"
        raise invalid("micro_batches", show(list(counts)), f"{expected} or than {MAX_MICRO_BATCHES}")


def plan_from_json(body: object, source: str = layout.PLAN, fail: Fail = damaged) -> Plan:
    """The plan of a JSON object. Raises ``fail``'s error, naming file, key and value, if it is invalid."""
    table = Table.of(body, source, fail, "a plan, an object")
    table.only(_REQUIRED, [key.name for key in fields(Plan) if key.name not in _REQUIRED])
    plan = Plan(
        tuple(_stage(part) for part in table.array("stages")),
        _ssm_ranks(table),
        _ladder(table, source, fail),
        table.text("origin"),
        table.counts("devices", MAX_RANKS) if table.has("devices") else (),
        table.counts("micro_batches", MAX_MICRO_BATCHES, 1) if table.has("micro_batches") else (),
        table.choice("ssm_place", PLACES).name if table.has("ssm_place") else "",
        table.text("machine") if table.has("machine") else "",
        tuple(sorted(_figures(table).items())),
        tuple(sorted(table.scalars("certificate").items())) if table.has("certificate") else (),
    )
    table.done()
    check_plan(plan, table.error)
    return plan


def _stage(part: Table) -> Stage:
    part.only([key.name for key in fields(Stage)])
    first, end = part.count("first_block", MAX_BLOCKS, 0), part.count("end_block", MAX_BLOCKS)
    stage = Stage(first, end, part.counts("ranks", MAX_RANKS))
    part.done()
    return stage


def _ssm_ranks(table: Table) -> tuple[tuple[int, ...], ...]:
    rows = table.rows("ssm_ranks", _SSM_RANKS)
    for ranks in rows:
        if not all(type(rank) is int and 0 <= rank <= MAX_RANKS for rank in ranks):
            raise table.error("ssm_ranks", show(ranks), _SSM_RANKS)
    return tuple(tuple(ranks) for ranks in rows)


def _ladder(table: Table, source: str, fail: Fail) -> DraftLadder:
    expected = "pairs [largest batch, draft plan] in ascending order"
    rows = table.rows("ladder", expected)
    before = 0
    for row in rows:
        valid = len(row) == 2 and type(row[0]) is int and isinstance(row[1], str) and row[1].strip()
        if not valid or not before < row[0] <= OPEN_BATCH:
            raise table.error("ladder", show(row) + (f" after {before}" if before else ""), expected)
        before = row[0]
    if not rows:
        raise table.error("ladder", "[]", f"one or more {expected}")
    return DraftLadder(tuple((batch, _draft(text, batch, source, fail)) for batch, text in rows))


def _draft(text: str, batch: int, source: str, fail: Fail) -> DraftPlan:
    try:
        return DraftPlan.parse(text)
    except RequestError as error:
        where = "any batch" if batch == OPEN_BATCH else f"batches to {batch}"
        raise fail(f"{source}: draft plan {text!r} for {where}: {error.found}", error.expected) from None


def _figures(table: Table) -> dict[str, float]:
    if not table.has("predicted"):
        return {}
    part = table.table("predicted")
    return {name: part.number(name, zero=True) for name in part.names()}

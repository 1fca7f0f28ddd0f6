"""The parallel plan of an artifact: stages with their TP degree and ranks, where each SSM lives, the tree ladder.

One rank is a plan with one stage of degree 1, not a path of its own. Owns the record and its JSON form; it neither
searches nor runs. What a search adds (devices, prediction, certificate) is optional, and absent from the file if empty.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from flexspec.checked_table import Fail, Table, show
from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.manifest import damaged
from flexspec.compiler.artifact.ssm_place import PLACES, place_named
from flexspec.draft_plan import OPEN_BATCH, DraftLadder, DraftPlan
from flexspec.errors import RequestError

MAX_BLOCKS = 65_536
MAX_RANKS = 4096
MOST_MICRO_BATCHES = 16


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks ``first_block`` to ``end_block`` (not included), split over ``ranks`` (TP degree = their number)."""

    first_block: int
    end_block: int
    ranks: tuple[int, ...]

    @property
    def degree(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Plan:
    """``ssm_ranks[i]`` run SSM i. ``ladder``: the draft plan of every batch size.

    ``devices[r]``: the machine's device of rank r (empty: rank r is device r). ``micro_batches``: how many are in
    flight, a rung of the ladder (empty: one). ``predicted`` are figures of the cost model.
    """

    stages: tuple[Stage, ...]
    ssm_ranks: tuple[tuple[int, ...], ...]
    ladder: DraftLadder
    origin: str  # "default", "search", "hand"
    devices: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    ssm_place: str = ""
    machine: str = ""
    predicted: tuple[tuple[str, float], ...] = ()
    certificate: tuple[tuple[str, Any], ...] = ()

    def micro_batches_for(self, batch: int) -> int:
        """Micro-batches in flight for this many requests; a plan with one number has it for all."""
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


def single_rank(blocks: int, ssms: int, draft: DraftPlan) -> Plan:
    """Everything on rank 0."""
    return Plan((Stage(0, blocks, (0,)),), ((0,),) * ssms, DraftLadder.of(draft), "default")


def plan_from_json(body: object, source: str = layout.PLAN, fail: Fail = damaged) -> Plan:
    """The plan of a JSON object. Raises ``fail``'s error, naming file, key and value, for what cannot be a plan."""
    table = Table.of(body, source, fail, "a plan, an object")
    table.only(_REQUIRED, [key.name for key in fields(Plan) if key.name not in _REQUIRED])
    stages = _stages(table)
    ssm_ranks = _ssm_ranks(table)
    devices = table.counts("devices", MAX_RANKS) if table.has("devices") else ()
    used = {rank for part in (*(stage.ranks for stage in stages), *ssm_ranks) for rank in part}
    if sorted(used) != list(range(len(used))):
        raise table.error("stages", f"ranks {sorted(used)}", f"{len(used)} ranks, from 0 to {len(used) - 1}")
    if devices and (len(devices) != len(used) or len(set(devices)) < len(devices)):
        raise table.error("devices", show(list(devices)), f"a device of its own for each of {len(used)} ranks")
    ladder = _ladder(table, source, fail)
    plan = Plan(
        stages,
        ssm_ranks,
        ladder,
        table.text("origin"),
        devices,
        _micro_batches(table, ladder),
        _place(table, stages, ssm_ranks),
        table.text("machine") if table.has("machine") else "",
        tuple(sorted(_figures(table).items())),
        tuple(sorted(table.scalars("certificate").items())) if table.has("certificate") else (),
    )
    table.done()
    return plan


def _stages(table: Table) -> tuple[Stage, ...]:
    """Stages in order, without gaps; a rank is in one of them."""
    stages: list[Stage] = []
    taken: set[int] = set()
    for part in table.array("stages"):
        part.only([key.name for key in fields(Stage)])
        first = part.count("first_block", MAX_BLOCKS, 0)
        end = part.count("end_block", MAX_BLOCKS)
        ranks = part.counts("ranks", MAX_RANKS)
        part.done()
        before = stages[-1].end_block if stages else 0
        if first != before:
            raise part.error("first_block", f"{first}", f"{before}, where the stage before ends" if stages else "0")
        if end <= first:
            raise part.error("end_block", f"{end}", f"more than first_block, {first}")
        if not ranks or taken & set(ranks) or len(set(ranks)) < len(ranks):
            raise part.error("ranks", show(list(ranks)), "a rank or more, each in one stage and once")
        taken |= set(ranks)
        stages.append(Stage(first, end, ranks))
    return tuple(stages)


def _ssm_ranks(table: Table) -> tuple[tuple[int, ...], ...]:
    expected = "a list of the ranks that run it for each SSM"
    rows = table.rows("ssm_ranks", expected)
    for ranks in rows:
        sound = all(type(rank) is int and 0 <= rank <= MAX_RANKS for rank in ranks)
        if not ranks or not sound or len(set(ranks)) < len(ranks):
            raise table.error("ssm_ranks", show(ranks), expected)
    return tuple(tuple(ranks) for ranks in rows)


def _ladder(table: Table, source: str, fail: Fail) -> DraftLadder:
    expected = "pairs [largest batch, draft plan], batches rising"
    rows = table.rows("ladder", expected)
    before = 0
    for row in rows:
        sound = len(row) == 2 and type(row[0]) is int and isinstance(row[1], str) and row[1].strip()
        if not sound or not before < row[0] <= OPEN_BATCH:
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


def _micro_batches(table: Table, ladder: DraftLadder) -> tuple[int, ...]:
    if not table.has("micro_batches"):
        return ()
    counts = table.counts("micro_batches", MOST_MICRO_BATCHES, 1)
    rungs = ladder.rungs
    if len(counts) != len(rungs) or any(n > batch for n, (batch, _) in zip(counts, rungs, strict=True)):
        expected = f"for each of the ladder's {len(rungs)} batches a number that is not larger than the batch"
        raise table.error("micro_batches", show(list(counts)), expected)
    return counts


def _place(table: Table, stages: tuple[Stage, ...], ssm_ranks: tuple[tuple[int, ...], ...]) -> str:
    """``ssm_place``, if it agrees with the SSMs' ranks."""
    if not table.has("ssm_place"):
        return ""
    name = table.text("ssm_place")
    table.choice("ssm_place", PLACES)
    if not place_named(name).agrees([stage.ranks for stage in stages], ssm_ranks):
        raise table.error(
            "ssm_place", f"{name!r} with ssm_ranks {show(list(ssm_ranks))}", "a place that they agree with"
        )
    return name


def _figures(table: Table) -> dict[str, float]:
    if not table.has("predicted"):
        return {}
    part = table.table("predicted")
    return {name: part.number(name, zero=True) for name in part.names()}

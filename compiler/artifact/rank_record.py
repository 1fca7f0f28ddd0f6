"""``ranks.json`` of an artifact: what each rank of the plan opens, and the groups in which ranks communicate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flexspec.checked_table import Table, show
from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.manifest import damaged
from flexspec.compiler.artifact.plan import MAX_RANKS, Plan
from flexspec.errors import ArtifactError
from flexspec.graph import Graph
from flexspec.ops.record import record_of

NO_STAGE = -1


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank of the plan."""

    rank: int
    stage: int  # NO_STAGE: it only drafts and has no part of the LLM
    results: bool  # whether it has logits
    weights: tuple[str, ...]  # tensors of its file, in the order of the program's weight table
    groups: tuple[tuple[int, ...], ...]  # sorted ranks with which it reduces, combines or replicates

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def drafting_only(plan: Plan) -> list[RankRecord]:
    """Records of the plan's ranks that have SSMs and no part of the LLM."""
    stage_ranks = {rank for stage in plan.stages for rank in stage.ranks}
    extra = sorted({rank for ranks in plan.ssm_ranks for rank in ranks} - stage_ranks)
    return [RankRecord(rank, NO_STAGE, False, (), ()) for rank in extra]


def groups_of(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The groups in which a rank communicates, sorted and unique. ``graph``: the rank's part of the LLM."""
    groups = set()
    for node in graph.nodes:
        members = dict(node.attrs).get("ranks")
        if record_of(node).exchange and isinstance(members, tuple):
            groups.add(tuple(sorted(member for member in members if isinstance(member, int))))
    return tuple(sorted(groups))


def several_ranks(records: tuple[RankRecord, ...], name: str) -> tuple[RankRecord, ...]:
    """The records, if there are any. Raises ArtifactError for an artifact ``name`` whose plan has one rank."""
    if not records:
        raise ArtifactError(
            f"{name} holds a plan of one rank",
            "a plan of several",
            "compile it with --plan PLAN.json, or serve it without --ranks",
        )
    return records


def ranks_from_json(body: object) -> tuple[RankRecord, ...]:
    """All ranks in order. Raises ArtifactError if a field is missing or has the wrong type, or a rank is missing."""
    table = Table.of(body, layout.RANKS, damaged)
    records = tuple(_record(part) for part in table.array("ranks"))
    table.done()
    numbers = [record.rank for record in records]
    if numbers != list(range(len(records))):
        raise table.error("ranks", f"ranks {numbers}", f"{len(records)} ranks, numbered from 0")
    if not any(record.results for record in records):
        raise table.error("ranks", "no rank with results", "results on the ranks of the last stage")
    if any(rank not in numbers for record in records for group in record.groups for rank in group):
        raise table.error("ranks", "a group with an unknown rank", f"ranks 0 to {len(records) - 1}")
    return records


def _record(table: Table) -> RankRecord:
    expected = "lists of ranks"
    groups = tuple(tuple(group) for group in table.rows("groups", expected))
    if not all(type(rank) is int and 0 <= rank <= MAX_RANKS for group in groups for rank in group):
        raise table.error("groups", show(groups), expected)
    record = RankRecord(
        table.count("rank", MAX_RANKS, 0),
        table.count("stage", MAX_RANKS, NO_STAGE),
        table.flag("results"),
        table.texts("weights"),
        groups,
    )
    table.done()
    return record

"""``flexspec inspect MODEL --partition PLAN.json``: what each rank of a plan would store and run.

Cuts the graph as for a distributed run; weights are only named, not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flexspec.errors import CompileError
from flexspec.types import Role

if TYPE_CHECKING:
    from flexspec.cli.inspection.page import Page
    from flexspec.compiler.artifact.plan import Plan
    from flexspec.compiler.partition.rank_part import RankPart
    from flexspec.compiler.partition.shares import WeightSlice
    from flexspec.graph import Graph


def cut_parts(graph: Graph, plan: Plan, passes: Sequence[Any] | None) -> tuple[RankPart, ...]:
    """The parts of all ranks, after the passes if there are any. Raises PartitionError."""
    from flexspec.compiler.partition.cut_ranks import partition
    from flexspec.compiler.partition.lower_ranks import lower_ranks

    return partition(graph, plan.stages) if passes is None else lower_ranks(graph, plan.stages, passes)


def part_of(parts: Sequence[RankPart], rank: int) -> RankPart:
    """The part of a rank. Raises CompileError for a rank that the plan does not have."""
    for part in parts:
        if part.rank == rank:
            return part
    known = ", ".join(str(part.rank) for part in parts)
    raise CompileError(f"--rank {rank}", f"a rank of the plan's stages: {known}", "choose one of them")


def parts_page(parts: Sequence[RankPart], plan: Plan) -> Page:
    """One line per rank."""
    return {"ranks": [_row(part, plan) for part in parts]}


def rank_page(part: RankPart, plan: Plan, form: str) -> Page:
    """One rank: its graph, and how its weights are cut."""
    from flexspec.cli.inspection.page import graph_page

    weights = [
        {"weight": piece.name, "dims": _dims(piece.dims()), "of": _dims(piece.source_dims), "is": _cut(piece)}
        for piece in part.weights
    ]
    return {"rank": _row(part, plan), **graph_page(part.graph, form), "weights": weights}


def _row(part: RankPart, plan: Plan) -> dict[str, Any]:
    from flexspec.ops.record import record_of

    stage = plan.stages[part.stage]
    caches = part.graph.inputs_of(Role.KV)
    exchanges = Counter(node.op for node in part.graph.nodes if record_of(node).exchange)
    return {
        "rank": part.rank,
        "stage": part.stage,
        "blocks": f"{stage.first_block}-{stage.end_block - 1}",
        "degree": stage.degree,
        "parameter_bytes": sum(value.type.bytes({}) for value in part.graph.inputs_of(Role.WEIGHT)),
        "kv_bytes_a_token": sum(value.type.bytes({"P": 1}) // _page_tokens(value.type.dims[1]) for value in caches),
        "exchanges": ", ".join(f"{count} {op}" for op, count in sorted(exchanges.items())) or "none",
    }


def _page_tokens(dim: int | str) -> int:
    assert isinstance(dim, int), "a page has a fixed number of tokens"
    return dim


def _dims(dims: Sequence[int]) -> str:
    return "[" + ",".join(str(dim) for dim in dims) + "]"


def _cut(piece: WeightSlice) -> str:
    if piece.zeros:
        return "zeros, another rank has it"
    if piece.dim is None:
        return "whole"
    return f"{piece.first} to {piece.end} of dim {piece.dim}"

"""What an artifact holds for each rank of a plan of several: graph, program, its slice of the packed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.plan import Plan
from flexspec.compiler.artifact.rank_record import RankRecord, drafting_only, groups_of
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.compiler.partition.lower_ranks import lower_ranks
from flexspec.compiler.partition.rank_part import RankPart
from flexspec.compiler.partition.shares import cut_weights
from flexspec.compiler.passes.pipeline import LLM_PASSES
from flexspec.graph import Graph
from flexspec.kernels.cpu.exchange import split_logits
from flexspec.kernels.cpu.pack import GetWeight, pack
from flexspec.kernels.cpu.render import render
from flexspec.kernels.package.cpu import add_program
from flexspec.text import print_graph

Progress = Callable[[str, int, int], None]  # (what, done, of)


def add_ranks(
    writer: ArtifactWriter,
    graph: Graph,
    get: GetWeight,
    plan: Plan,
    isas: Sequence[str],
    dump_ir: Path | None,
    progress: Progress,
    *,
    for_gpus: bool = False,
) -> tuple[list[Graph], dict[str, dict[str, str]]]:
    """Cut the LLM's graph by the plan and store every rank's part.

    Returns the graphs, and by name the digests of ``add_program``. ``for_gpus``: for both backends.

    ``get(name)`` gives a whole weight in float32; ranks are made one after another, so that one rank's slices are in
    memory at a time. Raises PartitionError, PassError, CompileError, ToolchainError, WeightError.
    """
    parts = sorted(lower_ranks(graph, plan.stages, LLM_PASSES, dump_ir), key=lambda part: part.rank)
    records = []
    checks = {}
    for done, part in enumerate(parts):
        progress("building ranks", done, len(parts))
        record, checks[layout.rank_name(part.rank)] = _add_rank(writer, part, get, isas, for_gpus=for_gpus)
        records.append(record)
    progress("building ranks", len(parts), len(parts))
    records += drafting_only(plan)
    writer.add_json(layout.RANKS, {"ranks": [record.to_json() for record in records]})
    return [part.graph for part in parts], checks


def _add_rank(
    writer: ArtifactWriter, part: RankPart, get: GetWeight, isas: Sequence[str], *, for_gpus: bool
) -> tuple[RankRecord, dict[str, str]]:
    name = layout.rank_name(part.rank)
    program = render(split_logits(part.graph)[0])
    weights = cut_weights(part.weights, get)
    tensors = {
        f"{i:03d}.{entry.kind}": pack(entry, weights.__getitem__, program.dtype)
        for i, entry in enumerate(program.weights)
    }
    bf16 = [tensor for tensor, array in tensors.items() if array.dtype == np.uint16]
    writer.add_tensors(layout.packed_weights(name), tensors, bf16=bf16)
    if for_gpus:
        from flexspec.kernels.package.gpu import add_canonical_weights

        add_canonical_weights(writer, layout.canonical_weights(name), part.graph, weights.__getitem__)
    writer.add_bytes(layout.graph_file(name), print_graph(part.graph).encode())
    digests = add_program(writer, name, program, part.graph, list(tensors.values()), isas)
    return RankRecord(part.rank, part.stage, part.results > 0, tuple(tensors), groups_of(part.graph)), digests

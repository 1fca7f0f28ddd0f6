"""What an artifact holds for each rank of a plan of several: graph, program, its slice of the weights."""

from __future__ import annotations

from pathlib import Path

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.plan import Plan
from flexspec.compiler.artifact.rank_record import RankRecord, drafting_only, groups_of
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.compiler.partition.lower_ranks import lower_ranks
from flexspec.compiler.partition.rank_part import RankPart
from flexspec.compiler.partition.shares import cut_weights
from flexspec.compiler.passes.pipeline import LLM_PASSES
from flexspec.graph import Graph
from flexspec.kernels.cpu.pack import GetWeight
from flexspec.kernels.package.cpu import CpuPackage
from flexspec.kernels.package.parts import ModelPart
from flexspec.kernels.package.weight_store import WeightStore
from flexspec.progress import Progress
from flexspec.text import print_graph


def add_ranks(
    writer: ArtifactWriter,
    cpu: CpuPackage,
    llm: ModelPart,
    plan: Plan,
    dump_ir: Path | None,
    progress: Progress,
    *,
    for_gpus: bool = False,
) -> list[Graph]:
    """Cut the LLM's graph by the plan and store every rank's part; returns the graphs.

    ``for_gpus``: weights as GPUs read them too. Ranks are made one after another, so that one rank's slices are in
    memory at a time. Raises PartitionError, PassError, CompileError, ToolchainError, WeightError.
    """
    parts = sorted(lower_ranks(llm.graph, plan.stages, LLM_PASSES, dump_ir), key=lambda part: part.rank)
    records = []
    for done, part in enumerate(parts):
        progress("building ranks", done, len(parts))
        records.append(_add_rank(writer, cpu, part, llm.get, for_gpus=for_gpus))
    progress("building ranks", len(parts), len(parts))
    records += drafting_only(plan)
    writer.add_json(layout.RANKS, {"ranks": [record.to_json() for record in records]})
    return [part.graph for part in parts]


def _add_rank(writer: ArtifactWriter, cpu: CpuPackage, part: RankPart, get: GetWeight, *, for_gpus: bool) -> RankRecord:
    name = layout.rank_name(part.rank)
    weights = cut_weights(part.weights, get)
    # A store of its own: a rank opens no other's file.
    places = cpu.add(name, part.graph, weights.__getitem__, WeightStore(writer))
    if for_gpus:
        from flexspec.kernels.package.gpu import add_canonical_weights

        add_canonical_weights(writer, layout.canonical_weights(name), part.graph, weights.__getitem__)
    writer.add_bytes(layout.graph_file(name), print_graph(part.graph).encode())
    tensors = tuple(tensor for _, tensor in places)
    return RankRecord(part.rank, part.stage, part.results > 0, tensors, groups_of(part.graph))

"""What an artifact holds for each rank of a plan of several: graph, program, its slice of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.plan import Plan
from flexspec.compiler.artifact.rank_record import RankRecord, drafting_only, groups_of
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.compiler.partition.lower_ranks import lower_ranks
from flexspec.compiler.partition.rank_part import RankPart
from flexspec.compiler.partition.shares import cut_weights
from flexspec.compiler.passes.pipeline import LLM_PASSES
from flexspec.kernels.cpu.pack import GetWeight
from flexspec.kernels.package.devices.registry import DevicePackage, SharedRecords
from flexspec.kernels.package.parts import ModelPart
from flexspec.progress import Progress
from flexspec.text import print_graph


def add_ranks(
    writer: ArtifactWriter,
    packages: Sequence[DevicePackage],
    shared: SharedRecords,
    llm: ModelPart,
    plan: Plan,
    dump_ir: Path | None,
    progress: Progress,
) -> None:
    """Cut the LLM's graph by the plan and store every rank's part for every device.

    Ranks are built one after another, so that only one rank's slices are in memory at a time. Raises PartitionError,
    PassError, CompileError, ToolchainError, WeightError.
    """
    parts = sorted(lower_ranks(llm.graph, plan.stages, LLM_PASSES, dump_ir), key=lambda part: part.rank)
    records = []
    for done, part in enumerate(parts):
        progress("building ranks", done, len(parts))
        name = layout.rank_name(part.rank)
        _add_part(writer, packages, name, part, llm.get)
        tensors = tuple(tensor for _, tensor in shared.weight_tables.get(name, ()))
        records.append(RankRecord(part.rank, part.stage, part.results > 0, tensors, groups_of(part.graph)))
    progress("building ranks", len(parts), len(parts))
    records += drafting_only(plan)
    writer.add_json(layout.RANKS, {"ranks": [record.to_json() for record in records]})


def _add_part(
    writer: ArtifactWriter, packages: Sequence[DevicePackage], name: str, part: RankPart, get: GetWeight
) -> None:
    weights = cut_weights(part.weights, get)
    for package in packages:
        package.add_rank(name, part.graph, weights.__getitem__)
    writer.add_bytes(layout.graph_file(name), print_graph(part.graph).encode())

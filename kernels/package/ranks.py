"""What an artifact holds for each rank of a plan of several: graph, program, its slice of the packed weights.

Layout: graph/llm.rankN.fsg  kernels/cpu/llm.rankN/{program.cpp,ISA.so}  weights/llm.rankN.safetensors  ranks.json, and
weights/llm.rankN.canonical.safetensors for GPUs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from flexspec.compiler.artifact.plan import Plan
from flexspec.compiler.artifact.rank_record import RANKS_FILE, RankRecord, drafting_only, folder_of, groups_of
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.compiler.partition.lower_ranks import lower_ranks
from flexspec.compiler.partition.rank_part import RankPart
from flexspec.compiler.partition.shares import cut_weights
from flexspec.compiler.passes.pipeline import LLM_PASSES
from flexspec.graph import Graph
from flexspec.kernels.cpu.build import build_path
from flexspec.kernels.cpu.exchange import split_logits
from flexspec.kernels.cpu.pack import GetWeight, pack
from flexspec.kernels.cpu.render import render
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
) -> list[Graph]:
    """Cut the LLM's graph by the plan and store every rank's part; returns the graphs. ``for_gpus``: for both backends.

    ``get(name)`` gives a whole weight in float32; ranks are made one after another, so that one rank's slices are in
    memory at a time. Raises PartitionError, PassError, CompileError, ToolchainError, WeightError.
    """
    parts = sorted(lower_ranks(graph, plan.stages, LLM_PASSES, dump_ir), key=lambda part: part.rank)
    records = []
    for done, part in enumerate(parts):
        progress("building ranks", done, len(parts))
        records.append(_add_rank(writer, part, get, isas, for_gpus=for_gpus))
    progress("building ranks", len(parts), len(parts))
    records += drafting_only(plan)
    writer.add_json(RANKS_FILE, {"ranks": [record.to_json() for record in records]})
    return [part.graph for part in parts]


def _add_rank(
    writer: ArtifactWriter, part: RankPart, get: GetWeight, isas: Sequence[str], *, for_gpus: bool
) -> RankRecord:
    name = folder_of(part.rank)
    program = render(split_logits(part.graph)[0])
    weights = cut_weights(part.weights, get)
    tensors = {
        f"{i:03d}.{entry.kind}": pack(entry, weights.__getitem__, program.dtype)
        for i, entry in enumerate(program.weights)
    }
    bf16 = [tensor for tensor, array in tensors.items() if array.dtype == np.uint16]
    writer.add_tensors(f"weights/{name}.safetensors", tensors, bf16=bf16)
    if for_gpus:
        from flexspec.kernels.package.gpu import add_canonical_weights

        add_canonical_weights(writer, f"weights/{name}.canonical.safetensors", part.graph, weights.__getitem__)
    writer.add_bytes(f"graph/{name}.fsg", print_graph(part.graph).encode())
    writer.add_bytes(f"kernels/cpu/{name}/program.cpp", program.source.encode())
    for isa in isas:
        writer.add_file(f"kernels/cpu/{name}/{isa}.so", build_path(program.source, isa))
    return RankRecord(part.rank, part.stage, part.results > 0, tuple(tensors), groups_of(part.graph))

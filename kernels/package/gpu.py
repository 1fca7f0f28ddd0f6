"""What an artifact stores for GPUs: generated kernels of every target, and weights as the graphs name them.

The CPU programs read weights that are packed for their tiles; on a GPU a graph's matrix products run through torch,
which takes them in their dtype: what the graphs store otherwise is expanded here. The kernels are gpu/package.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.model_record import GpuRecord
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.graph import Graph, Value
from flexspec.kernels.cpu.pack import GetWeight
from flexspec.kernels.gpu.family import kernel_variants
from flexspec.kernels.gpu.package import ResourceRows, package_kernels
from flexspec.kernels.package.parts import ModelPart
from flexspec.kernels.package.weight_store import Place, WeightStore
from flexspec.types import DType, Role
from flexspec.weight_formats.registry import encode_weight, plain_format, stored_values


def add_gpu_parts(
    writer: ArtifactWriter,
    models: Sequence[ModelPart],
    targets: Sequence[str],
    max_tree_tokens: int,
    progress: Callable[[str, int, int], None],
    rank_graphs: Sequence[Graph] = (),
) -> tuple[ResourceRows, GpuRecord]:
    """Compile and store the kernels, then the weights; returns the kernels' resource table and model.json's part.

    ``rank_graphs``: parts of the LLM whose kernels are stored too (their weights are package/ranks.py's). Raises
    CompileError for an unknown target or a node that its kernel family cannot serve, ToolchainError without Triton.
    """
    graphs = [*(model.lowered for model in models), *rank_graphs]
    variants = [variant for graph in graphs for variant in kernel_variants(graph, max_tree_tokens).values()]
    progress("compiling GPU kernels", 0, len(targets))
    rows = package_kernels(variants, targets, writer.add_bytes)
    progress("compiling GPU kernels", len(targets), len(targets))
    store = WeightStore(writer)
    weights = {}
    for i, model in enumerate(models):
        progress("storing weights for GPUs", i, len(models))
        weights[model.name] = _add_weights(store, model)
    progress("storing weights for GPUs", len(models), len(models))
    return rows, GpuRecord(max_tree_tokens, weights)


def _add_weights(store: WeightStore, model: ModelPart) -> dict[str, Place]:
    """Store what no earlier model has; returns each weight's place."""
    tensors = _canonical(model.lowered, model.get)
    return store.add(layout.canonical_weights(model.name), tensors, bf16=_bf16(model.lowered))


def add_canonical_weights(writer: ArtifactWriter, file: str, graph: Graph, get: GetWeight) -> None:
    """All weights of a graph in a file of their own."""
    writer.add_tensors(file, _canonical(graph, get), bf16=_bf16(graph))


def _canonical(graph: Graph, get: GetWeight) -> dict[str, NDArray[np.generic]]:
    return {value.name: canonical_weight(value, get) for value in graph.inputs_of(Role.WEIGHT)}


def canonical_weight(value: Value, get: GetWeight) -> NDArray[np.generic]:
    """A weight as its graph's operators see it, in its dtype; bfloat16 as uint16 bits: numpy has no such type.

    Raises WeightError for a value out of the format's range.
    """
    seen = stored_values(value.name, value.type, get(value.name))
    return encode_weight(value.name, plain_format(value.type.dtype), seen)


def _bf16(graph: Graph) -> list[str]:
    return [value.name for value in graph.inputs_of(Role.WEIGHT) if value.type.dtype is DType.BF16]

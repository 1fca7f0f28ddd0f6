"""What an artifact stores for GPUs: generated kernels of every target, and weights as the graphs name them.

The CPU programs read weights that are packed for their tiles; on a GPU a graph's matrix products run through torch,
which takes them as they are. The kernels are gpu/package.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.model_record import GpuRecord
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.graph import Graph
from flexspec.kernels.cpu.pack import GetWeight, to_bf16_bits
from flexspec.kernels.gpu.family import kernel_variants
from flexspec.kernels.gpu.package import ResourceRows, package_kernels
from flexspec.kernels.package.parts import Part
from flexspec.kernels.package.weight_store import Place, WeightStore
from flexspec.types import DType, Role

_NUMPY_DTYPES = {DType.F32: np.float32, DType.F16: np.float16}


def add_gpu_parts(
    writer: ArtifactWriter,
    models: Sequence[Part],
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


def _add_weights(store: WeightStore, model: Part) -> dict[str, Place]:
    """Store what no earlier model has; returns each weight's place."""
    tensors = _canonical(model.lowered, model.get)
    return store.add(layout.canonical_weights(model.name), tensors, bf16=_bf16(tensors))


def add_canonical_weights(writer: ArtifactWriter, file: str, graph: Graph, get: GetWeight) -> None:
    """All weights of a graph in a file of their own."""
    tensors = _canonical(graph, get)
    writer.add_tensors(file, tensors, bf16=_bf16(tensors))


def _canonical(graph: Graph, get: GetWeight) -> dict[str, NDArray[np.generic]]:
    return {value.name: in_dtype(get(value.name), value.type.dtype) for value in graph.inputs_of(Role.WEIGHT)}


def _bf16(tensors: Mapping[str, NDArray[np.generic]]) -> list[str]:
    return [name for name, array in tensors.items() if array.dtype == np.uint16]


def in_dtype(array: NDArray[np.float32], dtype: DType) -> NDArray[np.generic]:
    """The array rounded to ``dtype``; bfloat16 as uint16 bits, because numpy has no such type."""
    if dtype is DType.BF16:
        return to_bf16_bits(array)
    return np.ascontiguousarray(array, _NUMPY_DTYPES[dtype])

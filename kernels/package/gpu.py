"""What an artifact stores for GPUs: generated kernels of every target, and weights as the graphs name them.

The CPU programs read weights that are packed for their tiles; on a GPU a graph's matrix products run through torch,
which takes them as they are. The kernels are gpu/package.py's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.model_record import GpuRecord
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.graph import Graph
from flexspec.kernels.cpu.pack import GetWeight, to_bf16_bits
from flexspec.kernels.gpu.family import kernel_variants
from flexspec.kernels.gpu.package import ResourceRows, package_kernels
from flexspec.types import DType, Role

_NUMPY_DTYPES = {DType.F32: np.float32, DType.F16: np.float16}
Place = tuple[str, str]  # file, tensor


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One model: its lowered graph and its weights in float32."""

    name: str
    graph: Graph
    get: GetWeight


def add_gpu_parts(
    writer: ArtifactWriter,
    models: Sequence[GpuModel],
    targets: Sequence[str],
    max_tree_tokens: int,
    progress: Callable[[str, int, int], None],
    rank_graphs: Sequence[Graph] = (),
) -> tuple[ResourceRows, GpuRecord]:
    """Compile and store the kernels, then the weights; returns the kernels' resource table and model.json's part.

    ``rank_graphs``: parts of the LLM whose kernels are stored too (their weights are package/ranks.py's). Raises
    CompileError for an unknown target or a node that its kernel family cannot serve, ToolchainError without Triton.
    """
    graphs = [*(model.graph for model in models), *rank_graphs]
    variants = [variant for graph in graphs for variant in kernel_variants(graph, max_tree_tokens).values()]
    progress("compiling GPU kernels", 0, len(targets))
    rows = package_kernels(variants, targets, writer.add_bytes)
    progress("compiling GPU kernels", len(targets), len(targets))
    stored: dict[str, Place] = {}
    weights = {}
    for i, model in enumerate(models):
        progress("storing weights for GPUs", i, len(models))
        weights[model.name] = _add_weights(writer, model, stored)
    progress("storing weights for GPUs", len(models), len(models))
    return rows, GpuRecord(max_tree_tokens, weights)


def _add_weights(writer: ArtifactWriter, model: GpuModel, stored: dict[str, Place]) -> dict[str, Place]:
    """Store what no earlier model has; ``stored`` are the places by content. Returns each weight's place."""
    file = layout.canonical_weights(model.name)
    tensors: dict[str, NDArray[np.generic]] = {}
    places: dict[str, Place] = {}
    for value in model.graph.inputs_of(Role.WEIGHT):
        array = in_dtype(model.get(value.name), value.type.dtype)
        key = _content_key(array, value.type.dtype)
        if key not in stored:  # an SSM may read the LLM's own embedding or head
            stored[key] = (file, value.name)
            tensors[value.name] = array
        places[value.name] = stored[key]
    if tensors:
        writer.add_tensors(file, tensors, bf16=[name for name, array in tensors.items() if array.dtype == np.uint16])
    return places


def add_canonical_weights(writer: ArtifactWriter, file: str, graph: Graph, get: GetWeight) -> None:
    """All weights of a graph in a file of their own."""
    tensors = {value.name: in_dtype(get(value.name), value.type.dtype) for value in graph.inputs_of(Role.WEIGHT)}
    writer.add_tensors(file, tensors, bf16=[name for name, array in tensors.items() if array.dtype == np.uint16])


def in_dtype(array: NDArray[np.float32], dtype: DType) -> NDArray[np.generic]:
    """The array rounded to ``dtype``; bfloat16 as uint16 bits, because numpy has no such type."""
    if dtype is DType.BF16:
        return to_bf16_bits(array)
    return np.ascontiguousarray(array, _NUMPY_DTYPES[dtype])


def _content_key(array: NDArray[np.generic], dtype: DType) -> str:
    digest = hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()
    return f"{dtype.value}{list(array.shape)} {digest}"

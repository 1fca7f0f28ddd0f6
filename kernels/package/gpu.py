"""What an artifact stores for GPUs: generated kernels of every target, and weights as the graphs name them.

CPU programs read weights that are packed into tiles; on a GPU a graph's matrix products run through torch, which takes
them in their dtype: weights in other formats are expanded here. gpu/package.py stores the kernels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.model_record import GpuRecord
from flexspec.graph import Graph, Value
from flexspec.kernels.cpu.pack import GetWeight
from flexspec.kernels.gpu.aot import triton_version
from flexspec.kernels.gpu.family import Variant, kernel_variants
from flexspec.kernels.gpu.package import package_kernels
from flexspec.kernels.package.devices.registry import PackageInputs
from flexspec.kernels.package.weight_store import Place, WeightStore
from flexspec.types import DType, Role
from flexspec.weight_formats.registry import encode_weight, plain_format, stored_values


class GpuPackage:
    """The GPUs' share of an artifact (devices/registry.py: DevicePackage).

    Raises CompileError for a node that its kernel family cannot serve, ToolchainError without Triton.
    """

    def __init__(self, inputs: PackageInputs) -> None:
        self._inputs, self._max_tree_tokens = inputs, inputs.options.max_tree_tokens
        self._store = WeightStore(inputs.writer)
        self._weights: dict[str, dict[str, Place]] = {}  # of models: each weight's place
        self._variants: list[Variant] = []

    def add_model(self, name: str, graph: Graph, get: GetWeight) -> None:
        self._add_variants(graph)
        tensors = _canonical(graph, get)
        self._weights[name] = self._store.add(layout.canonical_weights(name), tensors, bf16=_bf16(graph))

    def add_rank(self, name: str, graph: Graph, get: GetWeight) -> None:
        self._add_variants(graph)
        self._inputs.writer.add_tensors(layout.canonical_weights(name), _canonical(graph, get), bf16=_bf16(graph))

    def finish(self) -> None:
        """Compile and store the kernels."""
        targets, records, progress = self._inputs.targets, self._inputs.records, self._inputs.progress
        progress("compiling GPU kernels", 0, len(targets))
        records.resources += package_kernels(self._variants, targets, self._inputs.writer.add_bytes)
        progress("compiling GPU kernels", len(targets), len(targets))
        records.gpu = GpuRecord(self._max_tree_tokens, self._weights)
        records.tools["triton"] = triton_version()

    def _add_variants(self, graph: Graph) -> None:
        self._variants += kernel_variants(graph, self._max_tree_tokens).values()


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

"""Run a graph on the torch references of its operator records: the oracle for every generated backend."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flexspec.graph import Graph
from flexspec.ops.record import record_of
from flexspec.types import DType

TORCH_DTYPES = {
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.I8: torch.int8,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.U64: torch.uint64,
}


@torch.no_grad()
def run_graph(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs of a graph by name. ``inputs`` has every graph input, of the graph's dtypes, on one device.

    Inputs are not modified. Symbolic dims take whatever size the tensors have. A missing input is a KeyError.
    """
    values = {value.name: inputs[value.name] for value in graph.inputs}
    last_use = {name: at for at, node in enumerate(graph.nodes) for name in node.inputs}
    kept = {*graph.outputs, *values}
    for at, node in enumerate(graph.nodes):
        results = record_of(node).reference([values[name] for name in node.inputs], dict(node.attrs))
        values.update((value.name, result) for value, result in zip(node.outputs, results, strict=True))
        for name in {*node.inputs, *(value.name for value in node.outputs)} - kept:
            if last_use.get(name, at) <= at:
                del values[name]
    return {name: values[name] for name in graph.outputs}

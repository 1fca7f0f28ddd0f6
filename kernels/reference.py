"""Run a graph on the torch references of its operator records: the oracle for every generated backend."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flexspec.errors import GraphError
from flexspec.graph import Graph, Node, Value
from flexspec.ops.record import record_of
from flexspec.types import DType
from flexspec.weight_formats.registry import plain_format, stored_values

TORCH_DTYPES = {
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.I8: torch.int8,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.U64: torch.uint64,
}


def weight_tensor(value: Value, array: NDArray[Any]) -> torch.Tensor:
    """A weight as operators see it, in its dtype, on the CPU; a copy, since what comes from a file is read-only.

    ``array`` is float32, or as canonical files hold it: of the weight's dtype, bfloat16 as its bits.
    """
    if array.dtype == np.float32:
        seen = stored_values(value.name, value.type, array)
    else:
        seen = plain_format(value.type.dtype).decode(array)
    return torch.from_numpy(np.array(seen)).to(TORCH_DTYPES[value.type.dtype])


Exchange = tuple[Node, Sequence[torch.Tensor]]  # a node where ranks meet, and this rank's operands
Walk = Generator[Exchange, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]


def run_graph(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs of a graph by name. ``inputs`` has every graph input, of the graph's dtypes, on one device.

    Inputs are not modified. Symbolic dims take whatever size the tensors have. A missing input is a KeyError. Raises
    GraphError for a graph that needs other ranks.
    """
    walk = walk_graph(graph, inputs)
    try:
        node, _ = next(walk)
    except StopIteration as done:
        outputs: dict[str, torch.Tensor] = done.value
        return outputs
    raise GraphError(f"graph {graph.name} meets other ranks at a {node.op}", "a graph of one rank", "run all ranks")


def walk_graph(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> Walk:
    """Like run_graph for one rank among several: yields at each exchange, and continues with the results sent in."""
    values = {value.name: inputs[value.name] for value in graph.inputs}
    last_use = {name: at for at, node in enumerate(graph.nodes) for name in node.inputs}
    pinned = {*graph.outputs, *values}
    for at, node in enumerate(graph.nodes):
        record = record_of(node)
        operands = [values[name] for name in node.inputs]
        if record.exchange:
            results = yield node, operands
        else:
            with torch.no_grad():  # not around the yield: grad mode is the thread's, and other ranks share it
                results = record.reference(operands, dict(node.attrs))
        values.update((value.name, result) for value, result in zip(node.outputs, results, strict=True))
        for name in {*node.inputs, *(value.name for value in node.outputs)} - pinned:
            if last_use.get(name, at) <= at:
                del values[name]
    return {name: values[name] for name in graph.outputs}

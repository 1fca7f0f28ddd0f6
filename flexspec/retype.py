"""Changes the storage of a finished graph: the format of its weight matrices, the dtype of its KV caches.

Model files know one dtype, that of the activations; how weights and caches are stored is chosen afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flexspec.errors import GraphError
from flexspec.graph import Graph, Node, Value
from flexspec.ops.record import record_of
from flexspec.types import DType, Role, TensorType, WeightFormat
from flexspec.verifier import verify


def store_weights(graph: Graph, stored: WeightFormat) -> Graph:
    """The graph with every weight matrix stored in a format; vectors (norms, biases) are unchanged.

    Raises GraphError naming a matrix whose rows are not whole blocks of the format.
    """
    changed = {}
    for value in graph.inputs_of(Role.WEIGHT):
        kind = value.type
        if len(kind.dims) < 2:
            continue
        row = kind.dims[-1]
        if not isinstance(row, int) or row % stored.block_elements:
            raise GraphError(
                f"weight {value.name} has rows of {row}",
                f"whole blocks of {stored.block_elements}, as {stored.name} stores them",
                "choose another format (--weights)",
            )
        changed[value.name] = replace(kind, format=None if stored.dtype is kind.dtype else stored)
    return _with_inputs(graph, changed)


def store_kv(graph: Graph, dtype: DType) -> Graph:
    """The graph with KV caches of ``dtype``. Raises GraphError for a dtype that no cache can have."""
    return _with_inputs(graph, {v.name: replace(v.type, dtype=dtype) for v in graph.inputs_of(Role.KV)})


def _with_inputs(graph: Graph, changed: Mapping[str, TensorType]) -> Graph:
    """The graph with inputs of other types; all other types follow from the operators' shape rules."""
    inputs = tuple(replace(v, type=changed.get(v.name, v.type)) for v in graph.inputs)
    known = {value.name: value.type for value in inputs}
    nodes: list[Node] = []
    for node in graph.nodes:
        types = record_of(node).shape([known[name] for name in node.inputs], dict(node.attrs))
        outputs = tuple(Value(v.name, kind) for v, kind in zip(node.outputs, types, strict=True))
        known.update((value.name, value.type) for value in outputs)
        nodes.append(replace(node, outputs=outputs))
    retyped = replace(graph, inputs=inputs, nodes=tuple(nodes))
    verify(retyped)
    return retyped

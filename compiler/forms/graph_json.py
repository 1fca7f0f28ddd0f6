"""The JSON form of a graph, for programs that read graphs without Python: names, types, operators, attributes."""

from __future__ import annotations

import json
from typing import Any

from flexspec.graph import Graph, Value


def graph_json(graph: Graph) -> str:
    """One JSON object, ending in a newline; ``hash`` is the structural hash."""
    body = {
        "name": graph.name,
        "hash": graph.hash(),
        "inputs": [_value(value) for value in graph.inputs],
        "nodes": [
            {
                "op": node.op,
                "inputs": list(node.inputs),
                "outputs": [_value(value) for value in node.outputs],
                "attrs": dict(node.attrs),
                "block": node.block,
            }
            for node in graph.nodes
        ],
        "outputs": list(graph.outputs),
    }
    return json.dumps(body, indent=1) + "\n"


def _value(value: Value) -> dict[str, Any]:
    kind = value.type
    body = {"name": value.name, "dtype": kind.dtype.value, "dims": list(kind.dims), "role": kind.role.value}
    return body | ({"format": kind.format.name} if kind.format else {})

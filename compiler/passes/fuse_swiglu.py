"""Pass: swiglu(linear(x, gate), linear(x, up)) becomes linear_swiglu(x, gate, up), which reads x once."""

from __future__ import annotations

from dataclasses import replace

from flexspec.graph import Graph, Node


def fuse_swiglu(graph: Graph) -> Graph:
    """Fuse if both products have no bias, the same x, the same weight format and no other reader."""
    producers, users, types = graph.producers(), graph.users(), graph.types()
    nodes: list[Node | None] = list(graph.nodes)
    for at, node in enumerate(graph.nodes):
        if node.op != "swiglu" or not all(name in producers for name in node.inputs):
            continue
        gate_at, up_at = (producers[name] for name in node.inputs)
        gate, up = graph.nodes[gate_at], graph.nodes[up_at]
        fusible = gate_at != up_at and gate.inputs[0] == up.inputs[0]
        if not fusible or not all(_private_product(graph, product, users) for product in (gate, up)):
            continue
        if types[gate.inputs[1]].stored == types[up.inputs[1]].stored:
            nodes[gate_at] = nodes[up_at] = None
            nodes[at] = replace(node, op="linear_swiglu", inputs=(gate.inputs[0], gate.inputs[1], up.inputs[1]))
    return replace(graph, nodes=tuple(node for node in nodes if node is not None))


def _private_product(graph: Graph, node: Node, users: dict[str, list[int]]) -> bool:
    """Whether a node is a linear without bias whose result has one reader and is not an output."""
    name = node.outputs[0].name
    return node.op == "linear" and len(node.inputs) == 2 and len(users[name]) == 1 and name not in graph.outputs

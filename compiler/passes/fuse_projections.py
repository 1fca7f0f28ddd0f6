"""Pass: linears that read the same x (q, k and v) become one linear_group, which reads x once."""

from __future__ import annotations

from dataclasses import replace

from flexspec.graph import Graph, Node

_MOST = 8  # products of a group; the record's arity is 1 + 2 * 8


def fuse_projections(graph: Graph) -> Graph:
    """Group linears of one x and one block that agree on having a bias and on the format of their weights.

    The group stands where its first member stood. Weights and biases are graph inputs, so nothing a group reads can be
    defined between its members. A linear with an operand that a node computes is left alone.
    """
    computed, types = graph.producers(), graph.types()
    groups: dict[tuple[str, bool, str, int | None], list[int]] = {}
    for at, node in enumerate(graph.nodes):
        if node.op == "linear" and not any(name in computed for name in node.inputs[1:]):
            x, weight, *bias = node.inputs
            groups.setdefault((x, bool(bias), types[weight].stored, node.block), []).append(at)
    nodes: list[Node | None] = list(graph.nodes)
    for (_, biased, _, _), members in groups.items():
        for first in range(0, len(members), _MOST):
            part = members[first : first + _MOST]
            if len(part) > 1:
                nodes[part[0]] = _group([graph.nodes[at] for at in part], biased)
                for at in part[1:]:
                    nodes[at] = None
    return replace(graph, nodes=tuple(node for node in nodes if node is not None))


def _group(members: list[Node], biased: bool) -> Node:
    weights = [node.inputs[1] for node in members]
    biases = [node.inputs[2] for node in members if biased]
    outputs = tuple(node.outputs[0] for node in members)
    attrs = (("biased", biased), ("count", len(members)))
    return Node("linear_group", (members[0].inputs[0], *weights, *biases), outputs, attrs, members[0].block)

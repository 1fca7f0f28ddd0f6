"""Pass: linears that read the same x (q, k and v) become one linear_group, which reads x once."""

from __future__ import annotations

from dataclasses import replace

from flexspec.graph import Graph, Node

_MAX_PRODUCTS = 8  # in a group; the record's arity is 1 + 2 * 8


def fuse_projections(graph: Graph) -> Graph:
    """Group linears with the same x, block and weight format, all with a bias or all without.

    The group takes the place of its first member. Weights and biases are graph inputs, so nothing that a group reads
    can be defined between its members. Linears with computed weights or biases are left alone.
    """
    computed, types = graph.producers(), graph.types()
    groups: dict[tuple[str, bool, str, int | None], list[int]] = {}
    for at, node in enumerate(graph.nodes):
        if node.op == "linear" and not any(name in computed for name in node.inputs[1:]):
            x, weight, *bias = node.inputs
            groups.setdefault((x, bool(bias), types[weight].stored, node.block), []).append(at)
    nodes: list[Node | None] = list(graph.nodes)
    for (_, biased, _, _), members in groups.items():
        for first in range(0, len(members), _MAX_PRODUCTS):
            part = members[first : first + _MAX_PRODUCTS]
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

"""Pass: add(r, linear(x, w)) becomes linear_add(x, w, r), so that the sum needs no extra pass over memory."""

from __future__ import annotations

from dataclasses import replace

from flexspec.graph import Graph, Node


def fuse_residual(graph: Graph) -> Graph:
    """Fuse an add with the linear that feeds it, if the add is its only reader; of two such linears, take the later."""
    producers, users = graph.producers(), graph.users()
    nodes: list[Node | None] = list(graph.nodes)
    for at, node in enumerate(graph.nodes):
        if node.op != "add" or node.inputs[0] == node.inputs[1]:
            continue
        sources = [(producers.get(name, -1), name) for name in node.inputs]
        products = [
            (source, name)
            for source, name in sources
            if source >= 0
            and graph.nodes[source].op == "linear"
            and len(users[name]) == 1
            and name not in graph.outputs
        ]
        if not products:
            continue
        source, name = max(products)
        residual = node.inputs[1] if node.inputs[0] == name else node.inputs[0]
        x, weight, *bias = graph.nodes[source].inputs
        nodes[source] = None
        nodes[at] = replace(node, op="linear_add", inputs=(x, weight, residual, *bias))
    return replace(graph, nodes=tuple(node for node in nodes if node is not None))

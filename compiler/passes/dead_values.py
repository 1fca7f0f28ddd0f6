"""Pass: drop operators whose results reach no output, and weights that are no longer read."""

from __future__ import annotations

from dataclasses import replace

from flexspec.graph import Graph
from flexspec.ops.record import record_of
from flexspec.types import Role


def dead_values(graph: Graph) -> Graph:
    """Keep what the outputs need. Inputs other than weights stay: they are the contract with the executor.

    Exchanges stay too: another rank may need the result, and waits for this one.
    """
    needed = set(graph.outputs)
    live_nodes = []
    for node in reversed(graph.nodes):
        if record_of(node).exchange or any(value.name in needed for value in node.outputs):
            live_nodes.append(node)
            needed.update(node.inputs)
    inputs = tuple(value for value in graph.inputs if value.type.role is not Role.WEIGHT or value.name in needed)
    return replace(graph, inputs=inputs, nodes=tuple(reversed(live_nodes)))

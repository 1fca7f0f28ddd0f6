"""Pass: drop operators whose results reach no output, and weights that then nobody reads."""

from __future__ import annotations

from dataclasses import replace

from flexspec.graph import Graph
from flexspec.types import Role


def dead_values(graph: Graph) -> Graph:
    """Keep what the outputs need. Inputs that are not weights stay: they are the contract with the executor."""
    needed = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if any(value.name in needed for value in node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    inputs = tuple(value for value in graph.inputs if value.type.role is not Role.WEIGHT or value.name in needed)
    return replace(graph, inputs=inputs, nodes=tuple(reversed(kept)))

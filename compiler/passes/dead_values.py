"""Pass: drop operators whose results reach no output, and weights that then nobody reads."""

from __future__ import annotations

from dataclasses import replace

from flexspec.graph import Graph
from flexspec.ops.record import record_of
from flexspec.types import Role


def dead_values(graph: Graph) -> Graph:
    """Keep what the outputs need. Inputs that are not weights stay: they are the contract with the executor.

    An exchange stays too: another rank may need its result, and waits for this one.
    """
    needed = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if record_of(node).exchange or any(value.name in needed for value in node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    inputs = tuple(value for value in graph.inputs if value.type.role is not Role.WEIGHT or value.name in needed)
    return replace(graph, inputs=inputs, nodes=tuple(reversed(kept)))

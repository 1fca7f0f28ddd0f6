"""Bounds on a graph's integer inputs, from the records of the operators that read them. Registers no operator."""

from __future__ import annotations

from flexspec.graph import Graph
from flexspec.ops.record import record_of

IDS, POSITIONS = "ids_T", "positions_T"  # the step inputs of flexspec/builder.py
NO_LIMIT = 2**31 - 1


def input_bound(graph: Graph, name: str) -> int:
    """The bound below which all values of the input must lie; NO_LIMIT if no operator that reads it has a bound."""
    types = graph.types()
    bound = NO_LIMIT
    for node in graph.nodes:
        rule = record_of(node).bounds
        if rule is not None and name in node.inputs:
            limits = rule([types[operand] for operand in node.inputs], dict(node.attrs))
            bound = min(bound, *(limits.get(i, bound) for i, operand in enumerate(node.inputs) if operand == name))
    return bound

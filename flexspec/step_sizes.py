"""Sizes of the inputs and outputs of a step, read off its graph.

The only place that knows which outputs of a graph are logits, which are features and which are only sent to ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from flexspec.errors import CompileError
from flexspec.graph import Graph
from flexspec.ops.bounds import IDS, POSITIONS, input_bound
from flexspec.ops.record import record_of, sent_values
from flexspec.types import Role


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a step of a model, or of a rank's part of it, takes and returns."""

    outputs: int  # columns of the logits; 0 for a stage before the last
    id_rows: int  # token ids are below it; NO_LIMIT: any
    max_positions: int  # positions are below it; NO_LIMIT: any
    feature_columns: int  # floats per row of its features; 0: it has none
    reads_features: int  # floats per row that it reads; 0: none


def step_sizes(graph: Graph) -> StepSizes:
    """The sizes of a graph. Ids and positions are limited by the shortest table that they index.

    Raises CompileError if logits or features have no fixed size.
    """
    types = graph.types()
    read = [value.type.dims[-1] for value in graph.inputs if value.type.role is Role.ACTIVATION]
    return StepSizes(
        outputs=_fixed(graph, types[graph.outputs[0]].dims[-1]) if has_logits(graph) else 0,
        id_rows=input_bound(graph, IDS),
        max_positions=input_bound(graph, POSITIONS),
        feature_columns=sum(_columns(graph, types[name].dims[1:]) for name in feature_outputs(graph)),
        reads_features=_fixed(graph, read[0]) if read else 0,
    )


def has_logits(graph: Graph) -> bool:
    """False for a stage before the last: its outputs are sent values and caches."""
    sent, types = sent_values(graph), graph.types()
    has_exchange = any(record_of(node).exchange for node in graph.nodes)
    return not (has_exchange and all(name in sent or types[name].role is Role.KV for name in graph.outputs))


def feature_outputs(graph: Graph) -> tuple[str, ...]:
    """The hidden states that a step outputs after its logits, in order."""
    sent, types = sent_values(graph), graph.types()
    return tuple(n for n in graph.outputs[1:] if types[n].role is Role.ACTIVATION and n not in sent)


def _columns(graph: Graph, dims: tuple[int | str, ...]) -> int:
    return prod(_fixed(graph, dim) for dim in dims)


def _fixed(graph: Graph, dim: int | str) -> int:
    if not isinstance(dim, int):
        raise CompileError(
            f"graph {graph.name} has a size {dim!r} where the program needs a number",
            "fixed sizes of logits and features",
            "give the model file the number",
        )
    return dim

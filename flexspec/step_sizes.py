"""Sizes of everything that is handed to a step and comes out of it, read off its graph.

The one place that knows which outputs of a graph are logits, which are features and which only travel to other ranks.
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
    """What a step of a model, or of a rank's part of one, takes and gives."""

    outputs: int  # columns of the logits; 0 for a stage before the last
    id_rows: int  # token ids are below; NO_LIMIT where any will do
    max_positions: int  # positions are below; NO_LIMIT where any will do
    feature_columns: int  # floats a row that are put out, 0 for none
    reads_features: int  # floats a row that are read, 0 for none


def step_sizes(graph: Graph) -> StepSizes:
    """The sizes of a graph. Ids and positions end where the shortest table that they index does.

    Raises CompileError when logits or features have no fixed size.
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
    """False for a stage before the last: its outputs are what it sends, and caches."""
    sent, types = sent_values(graph), graph.types()
    meets = any(record_of(node).exchange for node in graph.nodes)
    return not (meets and all(name in sent or types[name].role is Role.KV for name in graph.outputs))


def feature_outputs(graph: Graph) -> tuple[str, ...]:
    """The hidden states that a step puts out behind its logits, in order."""
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

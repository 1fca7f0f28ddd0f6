"""Sizes of everything that is handed to a step and comes out of it, read off its graph.

The one place that knows which outputs of a graph are logits, which are features and which only travel to other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from flexspec.errors import CompileError
from flexspec.graph import Graph, Node
from flexspec.ops.record import record_of
from flexspec.types import Role

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a step of a model, or of a rank's part of one, takes and gives."""

    outputs: int  # columns of the logits; 0 for a stage before the last
    id_rows: int  # token ids are below; NO_LIMIT where any will do
    max_positions: int  # positions are below; NO_LIMIT where any will do
    feature_columns: int  # floats a row that are put out, 0 for none
    reads_features: int  # floats a row that are read, 0 for none


def step_sizes(graph: Graph) -> StepSizes:
    """The sizes of a graph. Positions end where the shortest rotary table does.

    Raises CompileError when logits, embedding or features have no fixed size.
    """
    types = graph.types()
    # A rank that holds a part of the vocabulary reads any id: those of others give zeros.
    tables = [types[node.inputs[1]].dims[0] for node in graph.nodes if node.op == "embedding" and not node.attrs]
    limits = [node.attr("max_positions") for node in graph.nodes if node.op == "rope"]
    read = [value.type.dims[-1] for value in graph.inputs if value.type.role is Role.ACTIVATION]
    return StepSizes(
        outputs=_fixed(graph, types[graph.outputs[0]].dims[-1]) if has_logits(graph) else 0,
        id_rows=min((_fixed(graph, rows) for rows in tables), default=NO_LIMIT),
        max_positions=min((limit for limit in limits if isinstance(limit, int)), default=NO_LIMIT),
        feature_columns=sum(_columns(graph, types[name].dims[1:]) for name in feature_outputs(graph)),
        reads_features=_fixed(graph, read[0]) if read else 0,
    )


def has_logits(graph: Graph) -> bool:
    """False for a stage before the last: its outputs are what it sends, and caches."""
    sent, types = _sent(graph), graph.types()
    meets = any(record_of(node).exchange for node in graph.nodes)
    return not (meets and all(name in sent or types[name].role is Role.KV for name in graph.outputs))


def feature_outputs(graph: Graph) -> tuple[str, ...]:
    """The hidden states that a step puts out behind its logits, in order."""
    sent, types = _sent(graph), graph.types()
    return tuple(n for n in graph.outputs[1:] if types[n].role is Role.ACTIVATION and n not in sent)


def _sent(graph: Graph) -> set[str]:
    """Values that leave for another rank."""
    return {value.name for node in graph.nodes if _sends(node) for value in node.outputs}


def _sends(node: Node) -> bool:
    return record_of(node).kernel.cpu == "send"


def _columns(graph: Graph, dims: tuple[int | str, ...]) -> int:
    return prod(_fixed(graph, dim) for dim in dims)


def _fixed(graph: Graph, dim: int | str) -> int:
    if not isinstance(dim, int):
        raise CompileError(
            f"graph {graph.name} has a size {dim!r} where the program needs a number",
            "fixed sizes of logits, embedding and features",
            "give the model file the number",
        )
    return dim

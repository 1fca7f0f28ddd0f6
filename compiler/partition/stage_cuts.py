"""Cuts a graph into pipeline stages: which node runs in which stage, and which values pass between stages.

Nodes carry the number of their block; a node outside the blocks belongs to the last block whose results it needs. Nodes
before the blocks are in the first stage, nodes after them in the last. A stage's graph is an ordinary graph: received
values are inputs, sent values are outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexspec.compiler.artifact.plan import Stage, check_blocks, check_stages
from flexspec.errors import PartitionError
from flexspec.graph import Graph, Value
from flexspec.types import Role

_OWNED = (Role.WEIGHT, Role.KV)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that passes from one stage to another."""

    value: Value
    source: int  # stage that computes it
    target: int  # stage that needs it
    channel: int  # unique among the crossings of a graph


@dataclass(frozen=True, slots=True)
class StageCut:
    """One stage: its graph, and the crossings out of it and into it.

    Receiving in the order of source stages prevents deadlock even if sends block: the first stage never waits, so its
    messages arrive; then those of the second do, and so on.
    """

    stage: Stage
    graph: Graph  # its outputs: results, then sent values, then caches
    results: tuple[str, ...]  # outputs of the whole graph other than caches; only in the last stage
    sent: tuple[Crossing, ...]
    received: tuple[Crossing, ...]  # in the order of source stages


def cut_stages(graph: Graph, stages: Sequence[Stage]) -> tuple[StageCut, ...]:
    """Cut the graph between the stages. Raises PartitionError for stages that do not fit the graph."""
    blocks = graph.blocks()
    if not blocks:
        raise PartitionError(
            f"graph {graph.name}, whose operators belong to no block",
            "numbered decoder blocks, between which it can be cut into stages",
            "write them with `with b.block(i):` in the model file",
        )
    check_stages(stages, _invalid)
    check_blocks(stages[-1].end_block if stages else 0, 1 + max(blocks.values()), _invalid)
    place = _places(graph, stages, blocks)
    crossings = _crossings(graph, place, len(stages))
    return tuple(_stage_cut(graph, stages, place, crossings, at) for at in range(len(stages)))


def _invalid(key: str, found: str, expected: str) -> PartitionError:
    return PartitionError(f"{key}: {found}", expected, "correct the stages of the plan")


def _places(graph: Graph, stages: Sequence[Stage], blocks: dict[str, int]) -> dict[str, int]:
    """The stage that computes each value."""
    place: dict[str, int] = {}
    for node in graph.nodes:
        for value in node.outputs:
            block = blocks.get(value.name, 0)
            place[value.name] = next(i for i, stage in enumerate(stages) if block < stage.end_block)
    return place


def _crossings(graph: Graph, place: dict[str, int], stages: int) -> list[Crossing]:
    """All crossings, in the order in which their values are computed, then by target stage."""
    targets: dict[str, set[int]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            targets.setdefault(name, set()).add(place[node.outputs[0].name])
    types = graph.types()
    for name in graph.outputs:
        if types[name].role is not Role.KV:
            targets.setdefault(name, set()).add(stages - 1)
    crossings: list[Crossing] = []
    for node in graph.nodes:
        for value in node.outputs:
            source = place[value.name]
            for target in sorted(targets.get(value.name, set()) - {source}):
                crossings.append(Crossing(value, source, target, len(crossings)))
    return crossings


def _stage_cut(
    graph: Graph, stages: Sequence[Stage], place: dict[str, int], crossings: list[Crossing], at: int
) -> StageCut:
    sent = tuple(crossing for crossing in crossings if crossing.source == at)
    received = sorted((c for c in crossings if c.target == at), key=lambda c: (c.source, c.channel))
    nodes = tuple(node for node in graph.nodes if place[node.outputs[0].name] == at)
    types = graph.types()
    results = tuple(name for name in graph.outputs if types[name].role is not Role.KV)
    results = results if at == len(stages) - 1 else ()
    read = {name for node in nodes for name in node.inputs} | set(results)
    inputs = [v for v in graph.inputs if v.name in read or v.type.role in (Role.IDS, Role.TREE)]
    first_owned = next((i for i, v in enumerate(inputs) if v.type.role in _OWNED), len(inputs))
    caches = [name for name in graph.outputs if types[name].role is Role.KV and place.get(name) == at]
    outputs = dict.fromkeys([*results, *(crossing.value.name for crossing in sent), *caches])
    values = [crossing.value for crossing in received]
    name = f"{graph.name}.stage{at}" if len(stages) > 1 else graph.name
    cut = Graph(name, (*inputs[:first_owned], *values, *inputs[first_owned:]), nodes, tuple(outputs))
    return StageCut(stages[at], cut, results, sent, tuple(received))

"""Cuts a graph into pipeline stages: which node runs in which stage, and which values go from one to another.

Nodes carry the number of their block; one outside the blocks belongs to the last block that it needs. What comes before
the blocks is in the first stage, what comes after them in the last. A stage's graph is an ordinary graph; what it takes
from others are inputs, what it gives are outputs.
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
    """A value that stage ``source`` makes and stage ``target`` needs; ``channel`` tells the crossings apart."""

    value: Value
    source: int
    target: int
    channel: int


@dataclass(frozen=True, slots=True)
class StageCut:
    """One stage: its graph, and the crossings out of it and into it.

    The graph's outputs are ``results`` (those of the whole graph but the caches; in the last stage only), the values
    that are sent, then the caches. ``received`` is by source stage: the first stage never waits, so that its messages
    come through, then those of the second do, and no order of blocking sends and receives can lock ranks up.
    """

    stage: Stage
    graph: Graph
    results: tuple[str, ...]
    sent: tuple[Crossing, ...]
    received: tuple[Crossing, ...]


def cut_stages(graph: Graph, stages: Sequence[Stage]) -> tuple[StageCut, ...]:
    """The graph cut at the edges of the stages. Raises PartitionError for stages that do not fit the graph."""
    blocks = graph.blocks()
    if not blocks:
        raise PartitionError(
            f"graph {graph.name}, whose operators belong to no block",
            "decoder blocks with numbers, between which stages are cut",
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
    """The stage in which each computed value is made."""
    place: dict[str, int] = {}
    for node in graph.nodes:
        for value in node.outputs:
            block = blocks.get(value.name, 0)
            place[value.name] = next(i for i, stage in enumerate(stages) if block < stage.end_block)
    return place


def _crossings(graph: Graph, place: dict[str, int], stages: int) -> list[Crossing]:
    """In order of production, then of target."""
    targets: dict[str, set[int]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            targets.setdefault(name, set()).add(place[node.outputs[0].name])
    types = graph.types()
    for name in graph.outputs:
        if types[name].role is not Role.KV:
            targets.setdefault(name, set()).add(stages - 1)
    found: list[Crossing] = []
    for node in graph.nodes:
        for value in node.outputs:
            source = place[value.name]
            for target in sorted(targets.get(value.name, set()) - {source}):
                found.append(Crossing(value, source, target, len(found)))
    return found


def _stage_cut(
    graph: Graph, stages: Sequence[Stage], place: dict[str, int], crossings: list[Crossing], at: int
) -> StageCut:
    sent = tuple(each for each in crossings if each.source == at)
    arriving = sorted((each for each in crossings if each.target == at), key=lambda each: (each.source, each.channel))
    nodes = tuple(node for node in graph.nodes if place[node.outputs[0].name] == at)
    types = graph.types()
    results = tuple(name for name in graph.outputs if types[name].role is not Role.KV)
    results = results if at == len(stages) - 1 else ()
    read = {name for node in nodes for name in node.inputs} | set(results)
    inputs = [v for v in graph.inputs if v.name in read or v.type.role in (Role.IDS, Role.TREE)]
    first_owned = next((i for i, v in enumerate(inputs) if v.type.role in _OWNED), len(inputs))
    caches = [name for name in graph.outputs if types[name].role is Role.KV and place.get(name) == at]
    given = dict.fromkeys([*results, *(each.value.name for each in sent), *caches])
    values = [each.value for each in arriving]
    name = f"{graph.name}.stage{at}" if len(stages) > 1 else graph.name
    cut = Graph(name, (*inputs[:first_owned], *values, *inputs[first_owned:]), nodes, tuple(given))
    return StageCut(stages[at], cut, results, sent, tuple(arriving))

"""Checks that the graphs of all ranks match: every exchange has all its participants, and their types agree.

Simulates a step without tensors, where every send blocks until its recv: parts that pass cannot deadlock on any
transport.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexspec.compiler.partition.rank_part import RankPart
from flexspec.errors import PartitionError
from flexspec.graph import Graph, Node, as_int
from flexspec.ops.record import Collective, record_of

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Meeting:
    """An exchange, as all of its ranks must describe it."""

    kind: str  # operator, or "hop"
    ranks: Ranks  # of a hop: sender, receiver
    terms: str  # the attributes and type on which they must agree


def meeting_of(rank: int, node: Node) -> Meeting:
    """The exchange of ``node`` on ``rank``; equal for all ranks that take part in it."""
    attrs, kind, collective = dict(node.attrs), node.outputs[0].type, record_of(node).collective
    if collective is Collective.SEND:
        return Meeting("hop", (rank, as_int(attrs["to"])), f"channel {attrs['channel']}: {kind}")
    if collective is Collective.RECV:
        return Meeting("hop", (as_int(attrs["source"]), rank), f"channel {attrs['channel']}: {kind}")
    members = attrs["ranks"]
    assert isinstance(members, tuple)
    shared = {key: value for key, value in node.attrs if key not in ("part", "ranks")}
    return Meeting(node.op, tuple(as_int(member) for member in members), f"{shared}: {kind}")


def check_ranks(parts: Sequence[RankPart]) -> None:
    """Raise PartitionError if a step of these parts would deadlock."""
    graphs = {part.rank: part.graph for part in parts}
    if len(graphs) != len(parts):
        raise _mismatch("two parts of one rank")
    meetings = {rank: _meetings(rank, graph) for rank, graph in graphs.items()}
    done = dict.fromkeys(meetings, 0)
    while True:
        next_of = {rank: meetings[rank][i] for rank, i in done.items() if i < len(meetings[rank])}
        if not next_of:
            return
        met = {m for m in next_of.values() if all(next_of.get(rank) == m for rank in m.ranks)}
        if not met:
            raise _mismatch(_stuck(next_of))
        for rank, meeting in next_of.items():
            done[rank] += meeting in met


def _meetings(rank: int, graph: Graph) -> list[Meeting]:
    return [meeting_of(rank, node) for node in graph.nodes if record_of(node).exchange]


def _stuck(next_of: Mapping[int, Meeting]) -> str:
    shown = [f"rank {rank} at {m.kind} of {list(m.ranks)}, {m.terms}" for rank, m in sorted(next_of.items())]
    return "a deadlock between ranks: " + "; ".join(shown[:4]) + ("; ..." if len(shown) > 4 else "")


def _mismatch(found: str) -> PartitionError:
    return PartitionError(
        found, "exchanges in the same order on all ranks of a group", "use the parts of all ranks of one plan"
    )

"""Partition: from one graph to a graph for each rank, with the operators between ranks and a recipe for its weights.

Works on the graph as a model file builds it; lower_ranks.py then runs the passes on each rank's graph,
so that what is fused there is already cut. Stages come from stage_cuts.py, layouts from shard_layouts.py, ranges from
shares.py; this file writes the graphs. See docs/design/partition.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flexspec.compiler.artifact.plan import Stage
from flexspec.compiler.partition.check_ranks import check_ranks
from flexspec.compiler.partition.rank_part import RankPart
from flexspec.compiler.partition.shard_layouts import (
    WHOLE,
    ShardedNode,
    State,
    check_layout_names,
    shard_layouts,
    whole_layouts,
)
from flexspec.compiler.partition.shares import WeightSlice
from flexspec.compiler.partition.stage_cuts import Crossing, StageCut, cut_stages
from flexspec.compiler.passes.dead_values import dead_values
from flexspec.errors import PartitionError
from flexspec.graph import Attr, Graph, Node, Value, as_int
from flexspec.types import Dim, Role, TensorType
from flexspec.verifier import verify


def partition(
    graph: Graph, stages: Sequence[Stage], *, prefer: Mapping[str, str] | None = None
) -> tuple[RankPart, ...]:
    """The parts of all ranks, by stage and then in the order of the stage's ranks; each graph is verified.

    ``prefer`` names layouts of operators that are taken where each rank gets a part (``{"moe_experts": "experts"}``).
    Raises PartitionError for stages that do not fit the graph, and for what cannot be cut to a stage's degree.
    """
    check_layout_names(prefer or {})
    cuts = cut_stages(dead_values(graph), stages)
    parts: list[RankPart] = []
    for number, cut in enumerate(cuts):
        degree = cut.stage.degree
        layouts = shard_layouts(cut.graph, degree, prefer) if degree > 1 else whole_layouts(cut.graph)
        _check_axes(layouts, degree)
        for part, rank in enumerate(cut.stage.ranks):
            writer = _RankWriter(cut, cuts, part)
            rank_graph = writer.write(layouts)
            verify(rank_graph)
            parts.append(RankPart(rank, number, rank_graph, tuple(writer.slices), len(cut.results)))
    check_ranks(parts)
    return tuple(parts)


def _check_axes(layouts: Sequence[ShardedNode], degree: int) -> None:
    states = [state for each in layouts for state in (*each.inputs, *each.outputs)]
    for axis in {id(s.axis.root()): s.axis.root() for s in states if s.axis is not None}.values():
        axis.check(degree)


@dataclass(slots=True)
class _RankWriter:
    """Writes the graph of rank number ``part`` of a stage."""

    cut: StageCut
    cuts: Sequence[StageCut]
    part: int
    types: dict[str, TensorType] = field(init=False)  # of the uncut values
    blocks: dict[str, int | None] = field(init=False)  # of the nodes that compute the uncut values
    given: set[str] = field(init=False)  # names of the stage's inputs
    at_hand: dict[str, dict[tuple[int | str | None, int], str]] = field(default_factory=dict)  # name by state
    states: dict[str, list[State]] = field(default_factory=dict)
    inputs: dict[str, list[Value]] = field(default_factory=dict)  # local ones by the uncut input's name
    nodes: list[Node] = field(default_factory=list)
    slices: list[WeightSlice] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.types = self.cut.graph.types()
        self.blocks = {value.name: node.block for node in self.cut.graph.nodes for value in node.outputs}
        self.given = {value.name for value in self.cut.graph.inputs}
        self.taken = set(self.types)

    @property
    def degree(self) -> int:
        return self.cut.stage.degree

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.cut.stage.ranks

    def write(self, layouts: Sequence[ShardedNode]) -> Graph:
        arriving = {each.value.name for each in self.cut.received}
        for value in self.cut.graph.inputs:
            if value.type.role not in (Role.WEIGHT, Role.KV) and value.name not in arriving:
                self.inputs[value.name] = [value]
                self.note(value.name, WHOLE, value.name)
        for crossing in self.cut.received:
            self.receive(crossing)
        sent = [
            name for crossing in self.cut.sent if crossing.value.name in self.at_hand for name in self.send(crossing)
        ]
        for each in layouts:
            self.call(each)
            made = {value.name for value in each.node.outputs}
            sent += [name for crossing in self.cut.sent if crossing.value.name in made for name in self.send(crossing)]
        whole = [self.obtain(name, WHOLE) for name in self.cut.results]
        caches = [name for name in self.cut.graph.outputs if self.types[name].role is Role.KV]
        inputs = [local for value in self.cut.graph.inputs for local in self.inputs.get(value.name, [])]
        order = {value.name: at for at, value in enumerate(inputs)}
        self.slices.sort(key=lambda each: order[each.name])
        name = f"{self.cut.graph.name}.rank{self.ranks[self.part]}" if self.several else self.cut.graph.name
        return Graph(name, tuple(inputs), tuple(self.nodes), (*whole, *sent, *caches))

    @property
    def several(self) -> bool:
        return len(self.cuts) > 1 or self.degree > 1

    def note(self, name: str, state: State, local: str) -> None:
        self.at_hand.setdefault(name, {})[state.key()] = local
        self.states.setdefault(name, []).append(state)

    def fresh(self, name: str) -> str:
        local, count = name, 1
        while local in self.taken:
            local, count = f"{name}{count}", count + 1
        self.taken.add(local)
        return local

    def emit(self, op: str, name: str, operand: str, result: str, kind: TensorType, **attrs: Attr) -> str:
        """An operator on what this rank has of the uncut value ``name``, in that value's block."""
        outputs, pairs = (Value(result, kind),), tuple(sorted(attrs.items()))
        self.nodes.append(Node(op, (operand,), outputs, pairs, self.blocks.get(name)))
        return result

    def local_type(self, kind: TensorType, state: State) -> TensorType:
        if not isinstance(state.dim, int):
            return kind
        first, end = self.share(kind.dims[state.dim], state)
        dims: list[Dim] = list(kind.dims)
        dims[state.dim] = end - first
        return replace(kind, dims=tuple(dims))

    def share(self, extent: Dim, state: State) -> tuple[int, int]:
        assert state.axis is not None and isinstance(extent, int)
        return state.axis.share(extent, self.degree, self.part)

    def call(self, sharded: ShardedNode) -> None:
        """The node on this rank's operands; its attributes are those of the share."""
        node, layout = sharded.node, sharded.layout
        operands = tuple(self.obtain(*each) for each in zip(node.inputs, sharded.inputs, strict=True))
        split = [(n, s) for n, s in zip(node.inputs, sharded.inputs, strict=True) if isinstance(s.dim, int)]
        attrs = dict(node.attrs)
        if split:
            name, state = split[0]
            for key in layout.scaled_attrs:
                first, end = self.share(as_int(attrs[key]), state)
                attrs[key] = end - first
            if layout.first_attr is not None:
                assert isinstance(state.dim, int)
                attrs[layout.first_attr] = self.share(self.types[name].dims[state.dim], state)[0]
            if layout.whole_attr is not None:
                assert isinstance(state.dim, int)
                attrs[layout.whole_attr] = as_int(self.types[name].dims[state.dim])
        outputs: list[Value] = []
        for value, state in zip(node.outputs, sharded.outputs, strict=True):
            needed_whole = value.name in self.cut.graph.outputs and state.dim is not None
            renamed = needed_whole and value.type.role is not Role.KV  # the whole value keeps the output's name
            mark = "sum" if state.dim == "partial" else "part"
            local = self.fresh(f"{value.name}.{mark}") if renamed else value.name
            outputs.append(Value(local, self.local_type(value.type, state)))
            self.note(value.name, state, local)
        self.nodes.append(Node(node.op, operands, tuple(outputs), tuple(sorted(attrs.items())), node.block))

    def obtain(self, name: str, state: State) -> str:
        """The local name of a value in a state; what it takes to get there is written first."""
        found = self.at_hand.get(name, {}).get(state.key())
        if found is not None:
            return found
        kind = self.types[name]
        if kind.role in (Role.WEIGHT, Role.KV) and name in self.given:
            return self.own(name, state)
        if state.dim is None:
            local = self.make_whole(name, kind)
        else:
            assert isinstance(state.dim, int), "nothing becomes a partial sum"
            whole = self.obtain(name, WHOLE)
            first, end = self.share(kind.dims[state.dim], state)
            local = self.fresh(f"{name}.part")
            self.emit(
                "partition", name, whole, local, self.local_type(kind, state), dim=state.dim, first=first, end=end
            )
        self.note(name, state, local)
        return local

    def make_whole(self, name: str, kind: TensorType) -> str:
        """Reduce a sum or combine shares, whichever is at hand."""
        held = self.states[name][0]
        source = self.at_hand[name][held.key()]
        local = name if source != name else self.fresh(f"{name}.whole")
        if held.dim == "partial":
            return self.emit("reduce", name, source, local, kind, ranks=self.ranks)
        assert isinstance(held.dim, int) and held.axis is not None
        extent = kind.dims[held.dim]
        assert isinstance(extent, int)
        shares = [held.axis.share(extent, self.degree, part) for part in range(self.degree)]
        sizes = tuple(end - first for first, end in shares)
        return self.emit(
            "combine", name, source, local, kind, dim=held.dim, ranks=self.ranks, sizes=sizes, part=self.part
        )

    def own(self, name: str, state: State) -> str:
        """A weight or cache of this rank, as an input; a weight also gets its recipe."""
        kind = self.types[name]
        local = name if name not in self.inputs else self.fresh(f"{name}.cut")
        self.inputs.setdefault(name, []).append(Value(local, self.local_type(kind, state)))
        if kind.role is Role.WEIGHT:
            dims = tuple(as_int(dim) for dim in kind.dims)
            if isinstance(state.dim, int):
                first, end = self.share(dims[state.dim], state)
                self.slices.append(WeightSlice(local, name, dims, state.dim, first, end))
            else:
                self.slices.append(WeightSlice(local, name, dims, zeros=state.dim == "partial" and self.part > 0))
        self.note(name, state, local)
        return local

    def send(self, crossing: Crossing) -> list[str]:
        """The value to the rank of the same number in the target stage, if that has one."""
        peers = self.cuts[crossing.target].stage.ranks
        whole = self.obtain(crossing.value.name, WHOLE)
        if self.part >= len(peers):
            return []
        local = self.fresh(f"{crossing.value.name}.to{crossing.target}")
        to = peers[self.part]
        return [
            self.emit("send", crossing.value.name, whole, local, crossing.value.type, to=to, channel=crossing.channel)
        ]

    def receive(self, crossing: Crossing) -> None:
        """The value from the rank of the same number, or where the source stage has fewer, from a rank of this one."""
        value, peers = crossing.value, self.cuts[crossing.source].stage.ranks
        rows = self.row_counter(value)
        arriving: dict[str, Attr] = {
            "dtype": value.type.dtype.value,
            "columns": tuple(as_int(dim) for dim in value.type.dims[1:]),
        }
        first = self.part % len(peers)
        group = self.ranks[first :: len(peers)]
        source = rows
        if self.part < len(peers):
            local = value.name if len(group) == 1 else self.fresh(f"{value.name}.recv")
            source = self.emit(
                "recv",
                value.name,
                rows,
                local,
                value.type,
                source=peers[self.part],
                channel=crossing.channel,
                **arriving,
            )
        if len(group) > 1:
            self.emit("replicate", value.name, source, value.name, value.type, ranks=group, root=group[0], **arriving)
        self.note(value.name, WHOLE, value.name)

    def row_counter(self, value: Value) -> str:
        """A step input with as many entries as the value has rows."""
        for each in self.cut.graph.inputs:
            if each.type.role in (Role.IDS, Role.TREE) and each.type.dims == value.type.dims[:1]:
                return each.name
        raise PartitionError(
            f"%{value.name}: {value.type} goes from one stage to another",
            "a tensor whose first dim counts the rows of a step input",
            "cut the stages elsewhere",
        )

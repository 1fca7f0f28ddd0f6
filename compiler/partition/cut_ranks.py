"""Partition: one graph becomes a graph for each rank, with exchanges between ranks and a recipe for its weights.

Works on the graph as a model file builds it; lower_ranks.py then runs the passes on every rank's graph, so that fused
operators are already cut. Stages come from stage_cuts.py, layouts from shard_layouts.py, ranges from shares.py; this
file writes the graphs. See docs/design/partition.md.
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
    """The parts of all ranks, by stage and then in the order of the stage's ranks; every graph is verified.

    ``prefer`` names the layout to choose for an operator if every rank gets a part (``{"moe_experts": "experts"}``).
    Raises PartitionError for stages that do not fit the graph and operators that cannot be cut to a stage's degree.
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
    states = [state for sharded in layouts for state in (*sharded.inputs, *sharded.outputs)]
    for axis in {id(s.axis.root()): s.axis.root() for s in states if s.axis is not None}.values():
        axis.check(degree)


@dataclass(slots=True)
class _RankWriter:
    """Writes the graph of one rank of a stage."""

    cut: StageCut
    cuts: Sequence[StageCut]  # of all stages
    part: int  # index of the rank in the stage
    types: dict[str, TensorType] = field(init=False)  # of the uncut values
    blocks: dict[str, int | None] = field(init=False)  # of the nodes that compute the uncut values
    stage_inputs: set[str] = field(init=False)  # names
    available: dict[str, dict[tuple[int | str | None, int], str]] = field(
        default_factory=dict
    )  # by state, the local name
    states: dict[str, list[State]] = field(
        default_factory=dict
    )  # in which a value is available, its original one first
    inputs: dict[str, list[Value]] = field(default_factory=dict)  # by the uncut input's name, the local ones
    nodes: list[Node] = field(default_factory=list)
    slices: list[WeightSlice] = field(default_factory=list)
    used_names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.types = self.cut.graph.types()
        self.blocks = {value.name: node.block for node in self.cut.graph.nodes for value in node.outputs}
        self.stage_inputs = {value.name for value in self.cut.graph.inputs}
        self.used_names = set(self.types)

    @property
    def degree(self) -> int:
        return self.cut.stage.degree

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.cut.stage.ranks

    def write(self, layouts: Sequence[ShardedNode]) -> Graph:
        arriving = {crossing.value.name for crossing in self.cut.received}
        for value in self.cut.graph.inputs:
            if value.type.role not in (Role.WEIGHT, Role.KV) and value.name not in arriving:
                self.inputs[value.name] = [value]
                self.note(value.name, WHOLE, value.name)
        for crossing in self.cut.received:
            self.receive(crossing)
        sent = [
            name for crossing in self.cut.sent if crossing.value.name in self.available for name in self.send(crossing)
        ]
        for sharded in layouts:
            self.call(sharded)
            computed = {value.name for value in sharded.node.outputs}
            sent += [
                name for crossing in self.cut.sent if crossing.value.name in computed for name in self.send(crossing)
            ]
        results = [self.obtain(name, WHOLE) for name in self.cut.results]
        caches = [name for name in self.cut.graph.outputs if self.types[name].role is Role.KV]
        inputs = [local for value in self.cut.graph.inputs for local in self.inputs.get(value.name, [])]
        order = {value.name: position for position, value in enumerate(inputs)}
        self.slices.sort(key=lambda weight: order[weight.name])
        name = f"{self.cut.graph.name}.rank{self.ranks[self.part]}" if self.several else self.cut.graph.name
        return Graph(name, tuple(inputs), tuple(self.nodes), (*results, *sent, *caches))

    @property
    def several(self) -> bool:
        return len(self.cuts) > 1 or self.degree > 1

    def note(self, name: str, state: State, local: str) -> None:
        self.available.setdefault(name, {})[state.key()] = local
        self.states.setdefault(name, []).append(state)

    def fresh(self, name: str) -> str:
        local, count = name, 1
        while local in self.used_names:
            local, count = f"{name}{count}", count + 1
        self.used_names.add(local)
        return local

    def emit(self, op: str, name: str, operand: str, result: str, kind: TensorType, **attrs: Attr) -> str:
        """Write an operator on this rank's part of the uncut value ``name``, in that value's block."""
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
        """Write the node for this rank's operands, with attributes scaled to its share."""
        node, layout = sharded.node, sharded.layout
        operands = tuple(self.obtain(name, state) for name, state in zip(node.inputs, sharded.inputs, strict=True))
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
            renamed = needed_whole and value.type.role is not Role.KV  # the output's name is for the whole value
            mark = "sum" if state.dim == "partial" else "part"
            local = self.fresh(f"{value.name}.{mark}") if renamed else value.name
            outputs.append(Value(local, self.local_type(value.type, state)))
            self.note(value.name, state, local)
        self.nodes.append(Node(node.op, operands, tuple(outputs), tuple(sorted(attrs.items())), node.block))

    def obtain(self, name: str, state: State) -> str:
        """The local name of a value in a state, after writing the operators that convert it."""
        known = self.available.get(name, {}).get(state.key())
        if known is not None:
            return known
        kind = self.types[name]
        if kind.role in (Role.WEIGHT, Role.KV) and name in self.stage_inputs:
            return self.local_input(name, state)
        if state.dim is None:
            local = self.make_whole(name, kind)
        else:
            assert isinstance(state.dim, int), "no operator makes a partial sum of a whole value"
            uncut = self.obtain(name, WHOLE)
            first, end = self.share(kind.dims[state.dim], state)
            local = self.fresh(f"{name}.part")
            self.emit(
                "partition", name, uncut, local, self.local_type(kind, state), dim=state.dim, first=first, end=end
            )
        self.note(name, state, local)
        return local

    def make_whole(self, name: str, kind: TensorType) -> str:
        """Reduce a partial sum, or combine shares."""
        state = self.states[name][0]
        source = self.available[name][state.key()]
        local = name if source != name else self.fresh(f"{name}.whole")
        if state.dim == "partial":
            return self.emit("reduce", name, source, local, kind, ranks=self.ranks)
        assert isinstance(state.dim, int) and state.axis is not None
        extent = kind.dims[state.dim]
        assert isinstance(extent, int)
        shares = [state.axis.share(extent, self.degree, part) for part in range(self.degree)]
        sizes = tuple(end - first for first, end in shares)
        return self.emit(
            "combine", name, source, local, kind, dim=state.dim, ranks=self.ranks, sizes=sizes, part=self.part
        )

    def local_input(self, name: str, state: State) -> str:
        """A weight or cache as an input of this rank's graph; a weight also gets its recipe."""
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
        """Send the value to the rank of the same index in the target stage, if there is one."""
        peers = self.cuts[crossing.target].stage.ranks
        value = self.obtain(crossing.value.name, WHOLE)
        if self.part >= len(peers):
            return []
        local = self.fresh(f"{crossing.value.name}.to{crossing.target}")
        to = peers[self.part]
        return [
            self.emit("send", crossing.value.name, value, local, crossing.value.type, to=to, channel=crossing.channel)
        ]

    def receive(self, crossing: Crossing) -> None:
        """Receive the value from the rank of the same index or, if the source stage has fewer, from a peer."""
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
        for candidate in self.cut.graph.inputs:
            if candidate.type.role in (Role.IDS, Role.TREE) and candidate.type.dims == value.type.dims[:1]:
                return candidate.name
        raise PartitionError(
            f"%{value.name}: {value.type} goes from one stage to another",
            "a tensor whose first dim counts the rows of a step input",
            "cut the stages elsewhere",
        )

"""Chooses a tensor-parallel layout for each operator of a stage, from those that its record declares.

Greedy, in execution order: an operator gets the layout with the fewest exchanges for its operands; ties are broken by
the most weight elements cut, then the fewest local cuts, then the order of declaration. On a decoder this finds the
usual column and row cuts. A caller may prefer a layout by name. This file knows no operator by name and no ranks:
shares.py decides which rank has which part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexspec.compiler.partition.shares import Axis
from flexspec.errors import PartitionError
from flexspec.graph import Graph, Node
from flexspec.ops.record import TpLayout, record_of
from flexspec.types import Role, TensorType


@dataclass(frozen=True, slots=True)
class State:
    """How a value is distributed over ranks."""

    dim: int | str | None = None  # None: whole; "partial": a summand of a sum over ranks; a number: cut along that dim
    axis: Axis | None = None  # of the cut

    def key(self) -> tuple[int | str | None, int]:
        """Equal for states that are the same once all axes are known."""
        return self.dim, id(self.axis.root()) if self.axis else 0


WHOLE = State()


@dataclass(frozen=True, slots=True)
class ShardedNode:
    """A node, its layout, and the states of its operands and results."""

    node: Node
    layout: TpLayout
    inputs: tuple[State, ...]
    outputs: tuple[State, ...]


@dataclass(slots=True)
class _LayoutChooser:
    graph: Graph
    types: dict[str, TensorType]
    free: set[str]  # weights and caches: their reader chooses how they are distributed
    prefer: Mapping[str, str]  # by operator, the layout to choose if every rank gets a part
    degree: int
    states: dict[str, list[State]] = field(default_factory=dict)  # by value, those available, its original one first

    def cost(self, name: str, dim: int | str | None) -> tuple[int, int] | None:
        """(exchanges, conversions) needed to have ``name`` cut along ``dim``; None if that is impossible.

        A reduced sum is not used as a partial sum again: the residual stream stays whole, as on one rank.
        """
        available = self.states[name]
        if dim == "partial" and name not in self.free and WHOLE in available:
            return None
        if any(state.dim == dim for state in available):
            return 0, 0
        if name in self.free:
            return (0, 0) if dim != "partial" or self.types[name].role is Role.WEIGHT else None
        if dim == "partial":
            return None
        exchanges = 0 if any(state.dim is None for state in available) else 1
        return exchanges, exchanges + (0 if dim is None else 1)

    def price(self, node: Node, layout: TpLayout) -> tuple[int, int, int] | None:
        """(exchanges, negated weight elements cut, conversions); None if the layout is not legal."""
        kinds = [self.types[name] for name in node.inputs]
        if layout.operand_dims not in (None, len(kinds[0].dims) if kinds else 0):
            return None
        exchanges = conversions = cut = 0
        for position, (name, kind) in enumerate(zip(node.inputs, kinds, strict=True)):
            dim = layout.input_dim(position)
            if isinstance(dim, int) and (dim >= len(kind.dims) or isinstance(kind.dims[dim], str)):
                return None
            cost = self.cost(name, dim)
            if cost is None:
                return None
            exchanges, conversions = exchanges + cost[0], conversions + cost[1]
            if kind.role is Role.WEIGHT and isinstance(dim, int):
                cut += kind.elements({})
        for position, value in enumerate(node.outputs):
            dim = layout.output_dim(position)
            if isinstance(dim, int) and (dim >= len(value.type.dims) or isinstance(value.type.dims[dim], str)):
                return None
        return exchanges, -cut, conversions

    def choose(self, node: Node) -> ShardedNode:
        record = record_of(node)
        priced = [(self.price(node, layout), layout) for layout in record.layouts]
        legal = [(price, layout) for price, layout in priced if price is not None]
        if not legal:
            raise PartitionError(
                f"operator {node.op} of graph {self.graph.name} has no layout that fits its operands",
                "operators whose records declare tensor-parallel layouts",
                "declare one in the operator's record, or plan stages of one rank (a graph is cut only once)",
            )
        preferred = [layout for _, layout in legal if layout.name == self.prefer.get(node.op)]
        if preferred and self.parts(node, preferred[0]) >= self.degree:
            return self.settle(node, preferred[0])
        return self.settle(node, min(legal, key=lambda candidate: candidate[0])[1])

    def parts(self, node: Node, layout: TpLayout) -> int:
        """The most parts into which a layout can cut its operands."""
        kinds = [self.types[name] for name in node.inputs]
        dims = [(kind, layout.input_dim(position)) for position, kind in enumerate(kinds)]
        cut = [kind.dims[dim] for kind, dim in dims if isinstance(dim, int)]
        return min((size for size in cut if isinstance(size, int)), default=0)

    def settle(self, node: Node, layout: TpLayout) -> ShardedNode:
        """Apply a layout: unite the axes that it cuts alike, and record the states of operands and results."""
        cut, covering = Axis(_label(node, self.types)), Axis(_label(node, self.types))
        inputs: list[State] = []
        for position, name in enumerate(node.inputs):
            axis = covering if position in layout.covers[0] else cut
            inputs.append(self.operand(name, layout.input_dim(position), axis))
        outputs: list[State] = []
        for position, value in enumerate(node.outputs):
            axis = covering if position in layout.covers[1] else cut
            state = _cut(value.type, layout.output_dim(position), axis)
            outputs.append(state)
            self.states[value.name] = [state]
        if cut.root().extents and any(state.dim == "partial" for state in outputs):
            cut.root().must_tile = True
        if covering.root().extents:
            covering.root().cover(cut)
        return ShardedNode(node, layout, tuple(inputs), tuple(outputs))

    def operand(self, name: str, dim: int | str | None, axis: Axis) -> State:
        available = self.states[name]
        for state in available:
            if state.dim == dim:
                if state.axis is not None:
                    older, newer = (axis, state.axis) if axis.root().extents else (state.axis, axis)
                    older.unite(newer)  # errors name the axis by the first weight that it cuts
                return state
        if name not in self.free and all(state.dim is not None for state in available):
            for state in available:
                if state.axis is not None:
                    state.axis.root().must_tile = True
            available.append(WHOLE)
        state = _cut(self.types[name], dim, axis)
        if state.dim is not None or name in self.free:
            available.append(state)
        return state


def shard_layouts(graph: Graph, degree: int, prefer: Mapping[str, str] | None = None) -> tuple[ShardedNode, ...]:
    """Layouts of all nodes, in order, for ``degree`` ranks. Raises PartitionError if an operator has no legal one.

    ``prefer``: by operator, the name of the layout to choose if it is legal and gives every rank a part.
    """
    free = {value.name for value in graph.inputs if value.type.role in (Role.WEIGHT, Role.KV)}
    chooser = _LayoutChooser(graph, graph.types(), free, prefer or {}, degree)
    for value in graph.inputs:
        chooser.states[value.name] = [] if value.name in free else [WHOLE]
    return tuple(chooser.choose(node) for node in graph.nodes)


def check_layout_names(prefer: Mapping[str, str]) -> None:
    """Raise PartitionError for an unknown layout of an operator, GraphError for an unknown operator."""
    for op, name in prefer.items():
        known = [layout.name for layout in record_of(op).layouts]
        if name not in known:
            raise PartitionError(
                f"layout {name!r} of {op}",
                f"one of {', '.join(known) or 'none at all'}",
                "choose a layout of its record",
            )


def whole_layouts(graph: Graph) -> tuple[ShardedNode, ...]:
    """The layouts of a stage with one rank: nothing is cut."""
    uncut = TpLayout("replicated", (None,), (None,))
    return tuple(
        ShardedNode(node, uncut, (WHOLE,) * len(node.inputs), (WHOLE,) * len(node.outputs)) for node in graph.nodes
    )


def _cut(kind: TensorType, dim: int | str | None, axis: Axis) -> State:
    if not isinstance(dim, int):
        return State(dim)
    extent = kind.dims[dim]
    assert isinstance(extent, int), "price() rejects symbolic dims"
    last = dim == len(kind.dims) - 1  # a stored weight's blocks run along its rows
    axis.see(extent, kind.format.block_elements if kind.format and last else 1)
    return State(dim, axis)


def _label(node: Node, types: dict[str, TensorType]) -> str:
    """The name of an axis in errors: the first weight that it cuts, or the value."""
    weights = [name for name in node.inputs if types[name].role is Role.WEIGHT]
    return (weights or [node.outputs[0].name])[0]

"""A graph as Graphviz text: repeated blocks drawn once, shapes on the edges, colours by role.

flexspec inspect model.fspec --emit=dot | dot -Tsvg > model.svg
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flexspec.graph import Graph, Node, Value
from flexspec.text import print_attr
from flexspec.types import Role, TensorType

_COLOURS = {
    Role.WEIGHT: "#8a6d3b",
    Role.ACTIVATION: "#1f5fa8",
    Role.KV: "#2e7d32",
    Role.IDS: "#6a1b9a",
    Role.TREE: "#c2571a",
}
_MIN_PERIOD = 4  # shorter runs, such as two split_heads in a row, are not blocks


@dataclass(frozen=True, slots=True)
class Repeat:
    """Nodes ``start`` to ``start + count * period`` are ``count`` copies of one block of ``period`` nodes."""

    start: int
    period: int
    count: int

    def drawn(self, index: int) -> int:
        """The node drawn for node ``index``: itself, or its counterpart in the first copy."""
        last = self.start + self.count * self.period
        return self.start + (index - self.start) % self.period if self.start <= index < last else index

    def holds(self, index: int) -> bool:
        return self.start <= index < self.start + self.period


def find_repeat(graph: Graph) -> Repeat:
    """The run of equal blocks that covers most nodes, with the smallest period; count 1 if nothing repeats.

    Blocks are equal if operators, attributes, types and wiring are; weights and caches may differ in name.
    """
    marks = list(_marks(graph))
    best = Repeat(0, len(marks), 1)
    covered = 0
    for period in range(_MIN_PERIOD, len(marks) // 2 + 1):
        run = 0
        for i in range(len(marks) - period):
            run = run + 1 if marks[i] == marks[i + period] else 0
            count = run // period + 1
            if count > 1 and count * period > covered:
                covered = count * period
                best = Repeat(i + 1 - (count - 1) * period, period, count)
    return best


def _marks(graph: Graph) -> Iterator[tuple[object, ...]]:
    """What nodes of equal blocks agree in: operands are identified by distance, weights and caches by type."""
    types, producers = graph.types(), graph.producers()
    places = {v.name: j for node in graph.nodes for j, v in enumerate(node.outputs)}
    for i, node in enumerate(graph.nodes):
        operands: list[object] = []
        for name in node.inputs:
            per_block = types[name].role in (Role.WEIGHT, Role.KV)
            source = producers.get(name)
            if source is not None:
                operands.append((i - source, places[name]))
            else:
                operands.append(str(types[name]) if per_block else name)
        yield (node.op, node.attrs, tuple(str(v.type) for v in node.outputs), tuple(operands))


def to_dot(graph: Graph) -> str:
    """Graphviz text. Weights are listed in their operator's box; step inputs and caches have their own."""
    repeat = find_repeat(graph)
    folded = repeat.count > 1
    lines = [
        f'digraph "{graph.name}" {{',
        '  rankdir=TB; node [shape=box, style="rounded,filled", fillcolor="#f7f7f7", fontname="Helvetica"];',
        '  edge [fontname="Helvetica", fontsize=10];',
    ]
    drawn = [i for i in range(len(graph.nodes)) if repeat.drawn(i) == i]
    block = [i for i in drawn if folded and repeat.holds(i)]
    if block:
        lines += ["  subgraph cluster_block {", f'    label="x{repeat.count}"; style=dashed; color="#777777";']
        lines += [f"    {_box(graph, i)}" for i in block]
        lines.append("  }")
    lines += [f"  {_box(graph, i)}" for i in drawn if i not in block]
    lines += [f"  {line}" for line in _inputs(graph, drawn)]
    lines += [f"  {line}" for line in dict.fromkeys(_edges(graph, repeat, drawn))]
    lines += [f"  {line}" for line in dict.fromkeys(_outputs(graph, repeat))]
    return "\n".join([*lines, "}"]) + "\n"


def _box(graph: Graph, index: int) -> str:
    node = graph.nodes[index]
    types = graph.types()
    weights = [f"{name} {_dims(types[name])}" for name in node.inputs if types[name].role is Role.WEIGHT]
    shown = [f"{key}={print_attr(value)}" for key, value in node.attrs if key in ("eps", "scale", "mode", "heads")]
    label = "\\n".join(_escape(text) for text in (f"{node.op} {' '.join(shown)}".strip(), *weights))
    return f'n{index} [label="{label}", color="{_COLOURS[_main(node).type.role]}"];'


def _main(node: Node) -> Value:
    return node.outputs[0]


def _inputs(graph: Graph, drawn: list[int]) -> Iterator[str]:
    """Boxes of the inputs that a drawn node reads."""
    used = {name for i in drawn for name in graph.nodes[i].inputs}
    for i, value in enumerate(graph.inputs):
        if value.name in used and value.type.role is not Role.WEIGHT:
            colour = _COLOURS[value.type.role]
            label = f"{value.name}\\n{value.type.dtype.value} {_dims(value.type)}"
            yield f'i{i} [label="{label}", shape=ellipse, color="{colour}", fontcolor="{colour}"];'


def _edges(graph: Graph, repeat: Repeat, drawn: list[int]) -> Iterator[str]:
    types, producers = graph.types(), graph.producers()
    inputs = {value.name: f"i{i}" for i, value in enumerate(graph.inputs)}
    for i in drawn:
        for name in graph.nodes[i].inputs:
            if name in producers:
                yield _edge(f"n{repeat.drawn(producers[name])}", f"n{i}", types[name])
            elif types[name].role is not Role.WEIGHT:
                yield _edge(inputs[name], f"n{i}", types[name])
    second = range(repeat.start + repeat.period, repeat.start + 2 * repeat.period) if repeat.count > 1 else ()
    for i in second:  # what the next copy reads from this one
        for name in graph.nodes[i].inputs:
            if name in producers and repeat.holds(producers[name]):
                yield _edge(f"n{producers[name]}", f"n{repeat.drawn(i)}", types[name], ', style=dashed, xlabel="next"')


def _outputs(graph: Graph, repeat: Repeat) -> Iterator[str]:
    """One box per output, except for caches, which already have one as inputs."""
    types, producers = graph.types(), graph.producers()
    for i, name in enumerate(graph.outputs):
        if types[name].role is Role.KV:
            continue
        colour = _COLOURS[types[name].role]
        yield f'o{i} [label="{name}", shape=ellipse, peripheries=2, color="{colour}"];'
        source = f"n{repeat.drawn(producers[name])}" if name in producers else f"i{_position(graph, name)}"
        yield _edge(source, f"o{i}", types[name])


def _position(graph: Graph, name: str) -> int:
    return next(i for i, value in enumerate(graph.inputs) if value.name == name)


def _edge(source: str, target: str, kind: TensorType, more: str = "") -> str:
    return f'{source} -> {target} [label="{_dims(kind)}", color="{_COLOURS[kind.role]}"{more}];'


def _dims(kind: TensorType) -> str:
    return "[" + ",".join(str(dim) for dim in kind.dims) + "]"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')

"""The text form of a graph: printer and parser. ``parse(print_graph(g)) == g`` for every graph the verifier accepts.

graph llm {
  input %ids_T: i32[T]:ids
  %x: f32[T,64]:activation = rms_norm(%h, %norm.weight) {eps=1e-05} @0
  return %logits_LV
}

``@0`` is the node's block; nodes outside the blocks have none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeVar

from flexspec.errors import GraphTextError
from flexspec.graph import Attr, Graph, Node, Value
from flexspec.types import Dim, DType, Role, TensorType
from flexspec.weight_formats.registry import weight_formats

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<value>%[A-Za-z_][A-Za-z0-9_.]*)
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<number>[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+))
    | (?P<word>[A-Za-z_][A-Za-z0-9_.]*)
    | (?P<mark>[\[\](){}=:,@])
    )""",
    re.VERBOSE,
)


_DTYPES = {dtype.value: dtype for dtype in DType}
_ROLES = {role.value: role for role in Role}
_Item = TypeVar("_Item")


def print_attr(value: Attr) -> str:
    """An attribute as text: floats always have a point or an exponent, tuples are in brackets."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(print_attr(item) for item in value) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def print_node(node: Node) -> str:
    """One node as one line, without indentation."""
    outputs = ", ".join(f"%{value.name}: {value.type}" for value in node.outputs)
    attrs = ", ".join(f"{key}={print_attr(value)}" for key, value in node.attrs)
    call = f"{node.op}({', '.join('%' + name for name in node.inputs)})"
    block = "" if node.block is None else f" @{node.block}"
    return f"{outputs} = {call}" + (f" {{{attrs}}}" if attrs else "") + block


def graph_lines(graph: Graph) -> list[str]:
    """The lines of the text form: header, inputs, nodes, return, closing brace."""
    inputs = [f"  input %{value.name}: {value.type}" for value in graph.inputs]
    nodes = [f"  {print_node(node)}" for node in graph.nodes]
    outputs = ", ".join("%" + name for name in graph.outputs)
    return [f"graph {graph.name} {{", *inputs, *nodes, f"  return {outputs}".rstrip(), "}"]


def print_graph(graph: Graph) -> str:
    """The text form, ending in a newline."""
    return "\n".join(graph_lines(graph)) + "\n"


class _Line:
    """Tokens of one line, read left to right."""

    def __init__(self, text: str, number: int) -> None:
        self.text, self.number, self.at = text, number, 0

    def fail(self, expected: str) -> GraphTextError:
        rest = self.text[self.at :].strip() or "the end of the line"
        return GraphTextError(
            f"line {self.number}, column {self.at + 1}: {rest[:60]}", expected, f"correct the line: {self.text.strip()}"
        )

    def peek(self) -> str:
        match = _TOKEN.match(self.text, self.at)
        return match[0].strip() if match else ""

    def take(self, kind: str, expected: str) -> str:
        match = _TOKEN.match(self.text, self.at)
        if match is None or match.lastgroup != kind:
            raise self.fail(expected)
        self.at = match.end()
        return match[kind]

    def mark(self, text: str) -> None:
        if self.peek() != text:
            raise self.fail(repr(text))
        self.take("mark", repr(text))

    def end(self) -> None:
        if self.text[self.at :].strip():
            raise self.fail("the end of the line")

    def value_name(self) -> str:
        return self.take("value", "a value name such as %x")[1:]

    def listed(self, item: Callable[[], _Item], close: str) -> list[_Item]:
        """Items between commas up to the mark ``close``, which is consumed too."""
        items: list[_Item] = []
        while self.peek() != close:
            if items:
                self.mark(",")
            items.append(item())
        self.mark(close)
        return items

    def type(self) -> TensorType:
        name = self.take("word", "a dtype")
        if name not in _DTYPES:
            raise self.fail(f"one of {', '.join(_DTYPES)} before this (found {name!r})")
        self.mark("[")
        dims = self.listed(self.dim, "]")
        self.mark(":")
        role = self.take("word", "a role")
        if role not in _ROLES:
            raise self.fail(f"one of {', '.join(_ROLES)} before this (found {role!r})")
        if self.peek() != ":":
            return TensorType(_DTYPES[name], tuple(dims), _ROLES[role])
        self.mark(":")
        stored = self.take("word", "a weight format")
        if stored not in weight_formats():
            raise self.fail(f"one of {', '.join(weight_formats())} before this (found {stored!r})")
        return TensorType(_DTYPES[name], tuple(dims), _ROLES[role], weight_formats()[stored])

    def dim(self) -> Dim:
        if self.peek().isdigit():
            return int(self.take("number", "a dim"))
        return self.take("word", "a dim: a whole number or a letter")

    def block(self) -> int:
        self.mark("@")
        if not self.peek().isdigit():
            raise self.fail("a block number")
        return int(self.take("number", "a block number"))

    def typed_value(self) -> Value:
        name = self.value_name()
        self.mark(":")
        return Value(name, self.type())

    def attr(self) -> tuple[str, Attr]:
        key = self.take("word", "an attribute name")
        self.mark("=")
        if self.peek() != "[":
            return key, self.scalar()
        self.mark("[")
        items = self.listed(self.scalar, "]")
        if all(type(item) is int for item in items):
            return key, tuple(item for item in items if type(item) is int)
        if all(type(item) is float for item in items):
            return key, tuple(item for item in items if type(item) is float)
        raise self.fail("a list of whole numbers only or of floats only before this")

    def scalar(self) -> int | float | str | bool:
        text = self.peek()
        if text.startswith('"'):
            try:
                return str(json.loads(self.take("string", "a string")))
            except json.JSONDecodeError:
                raise self.fail("a JSON string before this") from None
        if text in ("true", "false"):
            return self.take("word", "a boolean") == "true"
        number = self.take("number", "a number, a string, true or false")
        return int(number) if number.lstrip("+-").isdigit() else float(number)


def _parse_node(line: _Line) -> Node:
    outputs = [line.typed_value()]
    while line.peek() == ",":
        line.mark(",")
        outputs.append(line.typed_value())
    line.mark("=")
    op = line.take("word", "an operator name")
    line.mark("(")
    inputs = line.listed(line.value_name, ")")
    attrs: list[tuple[str, Attr]] = []
    if line.peek() == "{":
        line.mark("{")
        attrs = line.listed(line.attr, "}")
    block = line.block() if line.peek() == "@" else None
    line.end()
    if len({key for key, _ in attrs}) != len(attrs):
        raise line.fail("every attribute once")
    return Node(op, tuple(inputs), tuple(outputs), tuple(sorted(attrs)), block)


def _word(line: _Line, text: str) -> None:
    if line.peek() != text:
        raise line.fail(repr(text))
    line.take("word", repr(text))


def parse_graph(text: str) -> Graph:
    """The graph of a text form; blank lines and lines that begin with # are skipped.

    Raises GraphTextError naming line and column. The result is not verified: see verifier.verify.
    """
    lines = [
        _Line(row, number) for number, row in enumerate(text.splitlines(), 1) if row.strip() and row.strip()[0] != "#"
    ]
    if len(lines) < 3:
        raise GraphTextError(
            f"{len(lines)} lines of text", "a header, a return line and a closing brace", "pass a graph"
        )
    header, *body, last, closing = lines
    closing.mark("}")
    closing.end()
    _word(header, "graph")
    name = header.take("word", "a graph name")
    header.mark("{")
    header.end()
    inputs: list[Value] = []
    nodes: list[Node] = []
    for line in body:
        if line.peek() != "input":
            nodes.append(_parse_node(line))
            continue
        if nodes:
            raise line.fail("inputs before the first operator")
        _word(line, "input")
        inputs.append(line.typed_value())
        line.end()
    _word(last, "return")
    outputs = [last.value_name()]
    while last.peek() == ",":
        last.mark(",")
        outputs.append(last.value_name())
    last.end()
    return Graph(name, tuple(inputs), tuple(nodes), tuple(outputs))

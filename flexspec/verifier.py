"""The rules of a graph: SSA order, unique names, arity, attributes, shape rules, outputs. Reads operator records only.

An error shows the operator, its line of text and five lines on either side.
"""

from __future__ import annotations

import math

from flexspec.errors import GraphError
from flexspec.graph import Attr, Graph, Node, Value
from flexspec.ops.record import OpRecord, record_of
from flexspec.text import NAME, graph_lines, print_attr
from flexspec.types import Role, TensorType

_CONTEXT_LINES = 5


def verify(graph: Graph) -> None:
    """Raise GraphError at the first broken rule; return None for a legal graph."""
    known: dict[str, TensorType] = {}
    blocks = graph.blocks()
    if not NAME.fullmatch(graph.name):
        raise GraphError(f"graph name {graph.name!r}", f"a name that matches {NAME.pattern}", "rename the graph")
    for i, value in enumerate(graph.inputs):
        _define(graph, known, value, 1 + i)
    for i, node in enumerate(graph.nodes):
        line = 1 + len(graph.inputs) + i
        try:
            verify_node(node, known)
            _check_block(node, blocks)
        except GraphError as error:
            raise _at(graph, line, f"{node.op}: {error.found}", error.expected, error.fix) from None
        for value in node.outputs:
            _define(graph, known, value, line)
    last = 1 + len(graph.inputs) + len(graph.nodes)
    if not graph.outputs:
        raise _at(graph, last, "a graph with no output", "at least one output", "return a value")
    for name in graph.outputs:
        if name not in known:
            raise _at(graph, last, f"output %{name}", "a value of this graph", "return a defined value")
    if len(set(graph.outputs)) != len(graph.outputs):
        raise _at(graph, last, "one value returned twice", "different outputs", "return every value once")


def verify_node(node: Node, known: dict[str, TensorType]) -> None:
    """Check one node against its record. ``known``: the types of the values defined before it."""
    record = record_of(node)
    for name in node.inputs:
        if name not in known:
            raise GraphError(f"%{name} used before its definition", "operands defined above", "reorder or define it")
    least, most = record.arity
    if not least <= len(node.inputs) <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise GraphError(f"{len(node.inputs)} operands", f"{wanted} operands", f"call {record.name} as: {record.doc}")
    check_attrs(record, node.attrs)
    derived = record.shape([known[name] for name in node.inputs], dict(node.attrs))
    declared = tuple(value.type for value in node.outputs)
    if derived != declared:
        expected = f"{_types(derived)} by the shape rule"
        raise GraphError(f"outputs {_types(declared)}", expected, "write the derived types")


def _check_block(node: Node, blocks: dict[str, int]) -> None:
    """Blocks run in order: a node may not read a value of a later one."""
    if node.block is None:
        return
    if node.block < 0:
        raise GraphError(f"block {node.block}", "a block number of at least 0", "number the decoder blocks from 0")
    late = next((name for name in node.inputs if blocks.get(name, 0) > node.block), None)
    if late is not None:
        raise GraphError(
            f"block {node.block} reads %{late} of block {blocks[late]}",
            "operands of this block or an earlier one",
            "number the decoder blocks in the order in which they run",
        )


def check_attrs(record: OpRecord, attrs: tuple[tuple[str, Attr], ...]) -> None:
    """Raise GraphError for an attribute that is missing, unknown, of the wrong type, not finite, or out of order."""
    keys = [key for key, _ in attrs]
    allowed = {**record.attrs, **record.optional_attrs}
    signature = ", ".join(f"{key}: {_type_name(kind)}" for key, kind in allowed.items()) or "none"
    fix = f"pass the attributes of {record.name}: {signature}"
    if keys != sorted(set(keys)):
        raise GraphError(f"attributes in the order {keys}", "sorted and each once", fix)
    missing = [key for key in record.attrs if key not in keys]
    if missing:
        raise GraphError(f"no attribute {', '.join(missing)}", "all of them", fix)
    for key, value in attrs:
        if key not in allowed:
            raise GraphError(f"unknown attribute {key}", "only known attributes", fix)
        wanted = allowed[key]
        kinds = wanted if isinstance(wanted, tuple) else (wanted,)
        if type(value) not in kinds:  # exact: a bool is not an int, and 1 is not 1.0 in the structural hash
            raise GraphError(f"{key}={print_attr(value)}", f"{key} of type {_type_name(allowed[key])}", fix)
        items = value if isinstance(value, tuple) else (value,)
        if any(isinstance(item, float) and not math.isfinite(item) for item in items):
            raise GraphError(f"{key}={print_attr(value)}", "finite numbers", fix)


def _type_name(kind: type | tuple[type, ...]) -> str:
    return " or ".join(k.__name__ for k in kind) if isinstance(kind, tuple) else kind.__name__


def _types(types: tuple[TensorType, ...]) -> str:
    return ", ".join(str(t) for t in types)


def _define(graph: Graph, known: dict[str, TensorType], value: Value, line: int) -> None:
    if value.name in known:
        raise _at(graph, line, f"%{value.name} defined twice", "every name once", "rename one of them")
    if not NAME.fullmatch(value.name):
        raise _at(graph, line, f"name {value.name!r}", f"a name that matches {NAME.pattern}", "rename it")
    for dim in value.type.dims:
        if not (dim > 0 if isinstance(dim, int) else NAME.fullmatch(dim)):
            raise _at(graph, line, f"%{value.name}: dim {dim!r}", "dims above 0 or letters", "correct the type")
    wrong = _wrong_format(value.type)
    if wrong:
        raise _at(graph, line, f"%{value.name}: {value.type}", wrong, "correct the type")
    known[value.name] = value.type


def _wrong_format(kind: TensorType) -> str:
    """What a type with an illegal weight format should have instead; empty for a legal one."""
    if kind.format is None:
        return ""
    row = kind.dims[-1] if kind.dims else 0
    if kind.role is not Role.WEIGHT or len(kind.dims) < 2 or not kind.dtype.is_float:
        return "a format for weight matrices of a floating-point dtype only"
    if kind.format.dtype is kind.dtype:
        return f"no format: {kind.dtype.value} is stored as {kind.dtype.value}"
    if not isinstance(row, int) or row % kind.format.block_elements:
        return f"rows of whole blocks of {kind.format.block_elements}"
    return ""


def _at(graph: Graph, line: int, found: str, expected: str, fix: str) -> GraphError:
    lines = graph_lines(graph)
    first = max(0, line - _CONTEXT_LINES)
    shown = "\n".join(
        f"{'->' if i == line else '  '} {i + 1:4d} | {text}"
        for i, text in enumerate(lines[first : line + _CONTEXT_LINES + 1], first)
    )
    return GraphError(f"{found}\n{shown}\n", expected, fix)

"""The verifier: one test a rule, and the shape of its message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexspec.errors import GraphError
from flexspec.graph import Graph, Node, Value
from flexspec.text import parse_graph
from flexspec.types import DType, Role, TensorType
from flexspec.verifier import verify

TEXT = """\
graph tiny {
  input %x_TE: f32[T,8]:activation
  input %norm.weight: f32[8]:weight
  %h: f32[T,8]:activation = rms_norm(%x_TE, %norm.weight) {eps=1e-05}
  %s: f32[T,2,4]:activation = split_heads(%h) {heads=2}
  %m: f32[T,8]:activation = merge_heads(%s) @0
  %y: f32[T,8]:activation = add(%x_TE, %m)
  return %y
}
"""


def test_the_graph_is_legal_as_written() -> None:
    verify(parse_graph(TEXT))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("= add(%x_TE, %m)", "= add(%x_TE, %z)", "%z used before its definition"),
        ("= rms_norm(%x_TE,", "= rms_norm(%y,", "%y used before its definition"),
        ("%m: f32", "%h: f32", "%h defined twice"),
        ("input %norm.weight:", "input %x_TE:", "%x_TE defined twice"),
        ("= add(%x_TE, %m)", "= add(%x_TE)", "1 operands"),
        ("= add(%x_TE, %m)", "= addd(%x_TE, %m)", "unknown operator 'addd'"),
        (" {eps=1e-05}", "", "no attribute eps"),
        ("{eps=1e-05}", "{eps=1}", "eps of type float"),
        ("{heads=2}", "{heads=true}", "heads of type int"),
        ("{heads=2}", "{heads=2, width=4}", "unknown attribute width"),
        ("{heads=2}", "{heads=3}", "a multiple of heads=3"),
        ("%m: f32[T,8]", "%m: f32[T,16]", r"outputs f32\[T,16\]"),
        ("%m: f32[T,8]:activation", "%m: f32[T,8]:kv", r"f32\[T,8\]:activation by the shape rule"),
        ("{heads=2}", "{heads=2} @1", "block 0 reads %s of block 1"),
        ("return %y", "return %z", "output %z"),
        ("return %y", "return %y, %y", "returned twice"),
        ("f32[8]:weight", "f32[0]:weight", "dim 0"),
    ],
)
def test_each_rule(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(GraphError, match=message):
        verify(parse_graph(TEXT.replace(old, new, 1)))


def test_rules_that_text_cannot_break() -> None:
    graph = parse_graph(TEXT)
    kind = TensorType(DType.F32, ("T", 8), Role.ACTIVATION)
    with pytest.raises(GraphError, match="at least one output"):
        verify(replace(graph, outputs=()))
    with pytest.raises(GraphError, match="name 'a b'"):
        verify(replace(graph, inputs=(*graph.inputs, Value("a b", kind))))
    with pytest.raises(GraphError, match="graph name ''"):
        verify(replace(graph, name=""))
    unsorted = Node("add", ("x_TE", "m"), (Value("z", kind),), (("b", 1), ("a", 1)))
    with pytest.raises(GraphError, match="sorted and each once"):
        verify(replace(graph, nodes=(*graph.nodes, unsorted)))
    infinite = replace(graph.nodes[0], attrs=(("eps", float("inf")),))
    with pytest.raises(GraphError, match="finite"):
        verify(replace(graph, nodes=(infinite, *graph.nodes[1:])))


def test_message_shows_the_line_between_five_on_either_side() -> None:
    chain = "".join(f"  %a{i}: f32[T,8]:activation = add(%x_TE, %h)\n" for i in range(9))
    bad = "  %bad: f32[T,8]:activation = add(%x_TE, %s)\n"
    text = TEXT.replace("  %y:", chain + bad + chain.replace("%a", "%b") + "  %y:")
    with pytest.raises(GraphError) as caught:
        verify(parse_graph(text))
    found = caught.value.found.splitlines()
    assert found[0] == "add: add(f32[T,8]:activation, f32[T,2,4]:activation)"
    assert found[1].strip().startswith("11 |") and "%a4:" in found[1]
    assert found[6].startswith("->") and bad.strip() in found[6]
    assert "%b4:" in found[-1] and len(found) == 12


def test_verifying_an_empty_body_is_fine() -> None:
    value = Value("x", TensorType(DType.F32, ("T",), Role.ACTIVATION))
    verify(Graph("identity", (value,), (), ("x",)))

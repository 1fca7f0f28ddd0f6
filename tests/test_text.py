"""The text form: every graph prints and parses back; broken text is refused with line and column."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexspec.builder import GraphBuilder
from flexspec.errors import GraphTextError
from flexspec.graph import Graph, Node, Value
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model
from flexspec.text import parse_graph, print_graph
from flexspec.types import DType, Role, TensorType
from flexspec.verifier import verify

TEXT = """\
graph tiny {
  input %x_TE: f32[T,8]:activation
  input %norm.weight: f32[8]:weight
  %h: f32[T,8]:activation = rms_norm(%x_TE, %norm.weight) {eps=1e-05} @3
  %y: f32[T,8]:activation = add(%x_TE, %h)
  return %y, %h
}
"""

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,12}", fullmatch=True)
types = st.builds(
    TensorType,
    st.sampled_from(DType),
    st.lists(st.integers(1, 2**40) | st.from_regex(r"[A-Z][0-9]?", fullmatch=True), max_size=4).map(tuple),
    st.sampled_from(Role),
)
floats = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.integers() | floats | st.text() | st.booleans()
attr_values = scalars | st.lists(st.integers()).map(tuple) | st.lists(floats).map(tuple)


@st.composite
def any_graphs(draw: st.DrawFn) -> Graph:
    """Graphs with legal names and otherwise anything: text must not depend on what operators mean."""
    values = [Value(n, draw(types)) for n in draw(st.lists(names, min_size=2, max_size=12, unique=True))]
    cut = draw(st.integers(1, len(values)))
    nodes = []
    for value in values[cut:]:
        operands = draw(st.lists(st.sampled_from(values).map(lambda v: v.name), max_size=4))
        attrs = draw(st.dictionaries(names, attr_values, max_size=4))
        nodes.append(
            Node(
                draw(names),
                tuple(operands),
                (value,),
                tuple(sorted(attrs.items())),
                draw(st.none() | st.integers(0, 99)),
            )
        )
    outputs = draw(st.lists(st.sampled_from(values).map(lambda v: v.name), min_size=1, max_size=3))
    return Graph(draw(names), tuple(values[:cut]), tuple(nodes), tuple(outputs))


@pytest.mark.slow(reason="hypothesis builds hundreds of graphs")
@given(any_graphs())
def test_any_graph_parses_back(graph: Graph) -> None:
    parsed = parse_graph(print_graph(graph))
    assert parsed == graph
    assert repr(parsed) == repr(graph)  # equality alone would let 1, 1.0 and True pass for one another


@st.composite
def legal_graphs(draw: st.DrawFn) -> Graph:
    """Random graphs that the builder accepts: chains and joins of four operators."""
    b = GraphBuilder("random", DType.F32)
    values = [b.input("x_TE", ("T", 8))]
    for i in range(draw(st.integers(1, 12))):
        x, y = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        kind = draw(st.integers(0, 3))
        if kind == 0:
            values.append(b.add(x, y))
        elif kind == 1:
            values.append(b.swiglu(x, y, name=f"gated.{i}"))
        elif kind == 2:
            values.append(b.rms_norm(x, b.weight("norm.weight", (8,)), draw(st.floats(1e-9, 1.0))))
        else:
            values.append(b.linear(x, b.weight(f"proj.{i}.weight", (8, 8))))
    return b.finish(values[-1])


@given(legal_graphs())
def test_legal_graphs_verify_and_hash_the_same_after_a_round_trip(graph: Graph) -> None:
    parsed = parse_graph(print_graph(graph))
    verify(parsed)
    assert parsed.hash() == graph.hash()


def test_llama_parses_back() -> None:
    graph = build_model(ModelConfig("llama", 32, 16, 2, 2, 1, 8, 24, 1e-5, 64), DType.BF16, taps=(1,))
    assert parse_graph(print_graph(graph)) == graph


def test_printed_form() -> None:
    graph = parse_graph(TEXT)
    verify(graph)
    assert print_graph(graph) == TEXT
    assert parse_graph("# a comment\n\n" + TEXT) == graph


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("graph tiny {", "grph tiny {", "line 1, column 1"),
        ("f32[8]:weight", "f32[8]:wieght", "line 3"),
        ("  input %x_TE: f32", "  input %x_TE: f33", "line 2"),
        ("[8]:weight", "[8:weight", "line 3"),
        ("{eps=1e-05}", "{eps=}", "line 4, column 64"),
        ("{eps=1e-05}", "{eps=[1, 2.0]}", "line 4"),
        ("{eps=1e-05}", '{eps="\\q"}', "line 4"),
        ("{eps=1e-05}", "{eps=1.0, eps=2.0}", "line 4"),
        ("add(%x_TE, %h)", "add(%x_TE %h)", "line 5"),
        ("add(%x_TE, %h)", "add(%x_TE, %h) junk", "line 5"),
        ("add(%x_TE, %h)", "add(%x_TE, h)", "line 5"),
        ("{eps=1e-05} @3", "{eps=1e-05} @x", "line 4, column 72"),
        ("  %y:", "  input %z: f32[T,8]:activation\n  %y:", "line 5"),
        ("return %y, %h", "return", "line 6"),
        ("  return %y, %h\n", "", "line 5"),
        ("}\n", "", "line 6"),
    ],
)
def test_broken_text_is_refused_with_its_place(old: str, new: str, where: str) -> None:
    head, found, tail = TEXT.rpartition(old)
    assert found
    with pytest.raises(GraphTextError, match=where):
        parse_graph(head + new + tail)


def test_attributes_may_be_written_in_any_order() -> None:
    text = TEXT.replace("add(%x_TE, %h)", "add(%x_TE, %h) {b=2, a=1}")
    assert parse_graph(text).nodes[-1].attrs == (("a", 1), ("b", 2))


def test_empty_text_is_refused() -> None:
    with pytest.raises(GraphTextError, match="header"):
        parse_graph("")

"""The graph-building API: errors point at the caller, names and input order, tied weights."""

from __future__ import annotations

import inspect

import pytest

from flexspec.builder import GraphBuilder
from flexspec.errors import GraphError
from flexspec.graph import Value
from flexspec.ops.rope import RopeConfig
from flexspec.types import DType, Role, TensorType


def test_a_bad_call_names_this_file_this_line_and_the_shapes() -> None:
    b = GraphBuilder("g", DType.F32)
    x = b.input("x_TE", ("T", 64))
    weight = b.weight("proj.weight", (128, 32))
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.raises(GraphError) as caught:
        b.linear(x, weight)
    assert caught.value.found.startswith(f"{__file__}:{line}: ")
    assert "linear(f32[T,64]:activation, f32[128,32]:weight)" in caught.value.found
    assert "[N,64]" in caught.value.expected


def test_a_refused_call_leaves_the_graph_as_it_was() -> None:
    b = GraphBuilder("g", DType.F32)
    x = b.input("x_TE", ("T", 64))
    with pytest.raises(GraphError):
        b.split_heads(x, 7)
    assert [node.op for node in b.finish(b.add(x, x)).nodes] == ["add"]


def test_inputs_come_first_then_weights_then_caches() -> None:
    b = GraphBuilder("g", DType.BF16)
    b.kv_cache("k_cache", 2, 8)
    weight = b.weight("w", (8, 8))
    step = b.step_inputs()
    x = b.linear(b.embedding(step.ids_T, weight), weight)
    graph = b.finish(x)
    assert [value.name for value in graph.inputs] == [
        "ids_T", "positions_T", "starts_R1", "contexts_R", "causal_R", "page_table_RB", "ancestors_TW",
        "logit_rows_L", "w", "k_cache",
    ]  # fmt: skip
    assert str(graph.inputs[-1].type) == "bf16[P,32,2,8]:kv"
    assert str(graph.types()["ancestors_TW"]) == "u64[T,W]:tree"


def test_the_same_weight_twice_is_tied_and_must_agree() -> None:
    b = GraphBuilder("g", DType.F32)
    assert b.weight("w", (8, 4)) == b.weight("w", (8, 4))
    with pytest.raises(GraphError, match="weight w declared as"):
        b.weight("w", (4, 8))


@pytest.mark.parametrize("name", ["x", "bad name", "%x"])
def test_names_are_unique_and_legal(name: str) -> None:
    b = GraphBuilder("g", DType.F32)
    x = b.input("x", ("T", 8))
    with pytest.raises(GraphError, match="name"):
        b.add(x, x, name=name)


def test_values_of_another_builder_are_refused() -> None:
    b = GraphBuilder("g", DType.F32)
    stranger = Value("y", TensorType(DType.F32, ("T", 8), Role.ACTIVATION))
    with pytest.raises(GraphError, match="a value of this builder"):
        b.add(stranger, stranger)


def test_call_checks_attributes_and_arity() -> None:
    b = GraphBuilder("g", DType.F32)
    x = b.input("x", ("T", 8))
    with pytest.raises(GraphError, match="no attribute heads"):
        b.call("split_heads", (x,))
    with pytest.raises(GraphError, match="add with 3 operands"):
        b.call("add", (x, x, x))
    with pytest.raises(GraphError, match="unknown operator 'gelu'"):
        b.call("gelu", (x,))


def test_unknown_rope_kind_is_refused() -> None:
    b = GraphBuilder("g", DType.F32)
    step = b.step_inputs()
    with pytest.raises(GraphError, match="kind one of"):
        b.rope(b.input("x", ("T", 2, 8)), step.positions_T, RopeConfig(kind="su"), 64)


def test_nodes_carry_the_block_they_are_written_in() -> None:
    b = GraphBuilder("g", DType.F32)
    x = b.input("x", ("T", 8))
    y = b.add(x, x)
    for i in range(2):
        with b.block(i):
            y = b.add(y, x)
    graph = b.finish(b.add(y, y))
    assert [node.block for node in graph.nodes] == [None, 0, 1, None]
    assert list(graph.blocks().values()) == [0, 1, 1], "what follows the blocks belongs to the last that it needs"


def test_extend_goes_on_where_a_graph_ends() -> None:
    b = GraphBuilder("g", DType.F32)
    x = b.input("x", ("T", 8))
    graph = b.finish(b.add(x, x, name="y"))
    more = GraphBuilder.extend(graph, DType.F32)
    y = Value("y", graph.types()["y"])
    longer = more.finish(more.linear(y, more.weight("w", (4, 8))))
    assert [node.op for node in longer.nodes] == ["add", "linear"] and graph.outputs == ("y",)

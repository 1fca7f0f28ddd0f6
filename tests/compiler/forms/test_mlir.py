"""The MLIR dialect: graphs round-trip exactly, and MLIR's verifier holds the rules of the operator records."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import pytest

from flexspec.builder import GraphBuilder
from flexspec.compiler.forms.mlir import from_mlir, to_mlir
from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.errors import GraphError, GraphTextError, ToolchainError
from flexspec.graph import Graph
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model
from flexspec.ops.rope import RopeConfig
from flexspec.types import DType

needs_torch_mlir = pytest.mark.skipif(
    importlib.util.find_spec("torch_mlir") is None,
    reason="torch-mlir is not installed (pip install 'flexspec[import]')",
)
LLAMA3 = RopeConfig(500_000.0, "llama3", 8.0, original_max_positions=128)
CONFIG = ModelConfig("llama", 40, 32, 2, 4, 2, 8, 48, 1e-5, 256, rope=LLAMA3, qkv_bias=True)


def tiny() -> Graph:
    b = GraphBuilder("tiny", DType.BF16)
    x = b.input("x_TE", ("T", 8))
    y = b.linear(x, b.weight("w", (8, 8)))
    return b.finish(b.split_heads(y, 2, name="heads"))


@needs_torch_mlir
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_models_round_trip(dtype: DType) -> None:
    graph = build_model(CONFIG, dtype)
    assert from_mlir(to_mlir(graph)) == graph
    assert from_mlir(to_mlir(graph)).hash() == graph.hash()


@needs_torch_mlir
def test_lowered_graphs_round_trip() -> None:
    """Groups with several results, optional attributes (mode), booleans (biased)."""
    graph = run_passes(build_model(replace(CONFIG, qk_norm=True), DType.BF16), LLM_PASSES)
    assert {"linear_group", "linear_add", "attention"} <= {node.op for node in graph.nodes}
    assert from_mlir(to_mlir(graph)) == graph


@needs_torch_mlir
def test_mixtures_of_experts_round_trip() -> None:
    config = replace(CONFIG, family="mixtral", qkv_bias=False, experts=5, experts_per_token=2, expert_ffn_size=24)
    for graph in (build_model(config, DType.BF16), run_passes(build_model(config, DType.F32), LLM_PASSES)):
        assert {"router", "moe_experts"} <= {node.op for node in graph.nodes}
        assert from_mlir(to_mlir(graph)) == graph


@needs_torch_mlir
def test_text_shows_symbols_roles_and_names() -> None:
    text = to_mlir(tiny())
    assert 'tensor<?x8xbf16, {role = "activation", symbols = ["T"]}> {flexspec.names = ["x_TE"]}' in text
    assert '"flexspec.split_heads"(%0) {flexspec.names = ["heads"], heads = 2 : i64}' in text


@needs_torch_mlir
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("heads = 2 : i64", "heads = 3 : i64", r"multiple of heads=3"),  # the record's shape rule
        ("heads = 2 : i64", 'heads = "two"', "heads of type int"),
        (", heads = 2 : i64", "", "heads"),
        ("heads = 2 : i64", "heads = 2 : i64, color = 1 : i64", "unknown attribute color"),
        ('{role = "weight"}', '{role = "hat"}', r'role = "hat"'),
        ('symbols = ["T"]', 'symbols = ["T", "U"]', "as many symbols as dynamic dims"),
        ("flexspec.split_heads", "flexspec.cut_heads", "cut_heads"),
        ('flexspec.names = ["heads"]', 'flexspec.names = "heads"', "0 names for 1 values"),
        ('flexspec.names = ["heads"]', 'flexspec.names = ["x_TE"]', "defined twice"),
        ("func.func @tiny", "func.func @tiny_", None),
        ("module {", "module { func.func private @other()", "one func.func"),
        ("return", "return %0 :", "custom op|expected"),
    ],
)
def test_changed_text_is_refused(old: str, new: str, message: str | None) -> None:
    text = to_mlir(tiny())
    changed = text.replace(old, new)
    assert changed != text
    if message is None:  # a name is not structure
        assert from_mlir(changed).hash() == tiny().hash()
        return
    with pytest.raises((GraphTextError, GraphError), match=message):
        from_mlir(changed)


@needs_torch_mlir
def test_an_illegal_graph_is_not_printed() -> None:
    graph = tiny()
    broken = replace(graph, nodes=(graph.nodes[0], graph.nodes[1].with_attr("heads", 4)))
    with pytest.raises(GraphError, match=r"outputs bf16\[T,2,4\].*by the shape rule"):
        to_mlir(broken)


def test_without_torch_mlir_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_mlir", None)
    for call in (lambda: to_mlir(tiny()), lambda: from_mlir("module {}")):
        with pytest.raises(ToolchainError, match=r"pip install 'flexspec\[import\]'"):
            call()

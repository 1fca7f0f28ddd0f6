"""The pass runner: order, verification after each pass with its name in the error, numbered dumps, what is left."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from flexspec.compiler.passes.pipeline import LLM_PASSES, SSM_PASSES, Pass, run_passes
from flexspec.errors import GraphError, PassError
from flexspec.graph import Graph
from flexspec.models.config import ModelConfig
from flexspec.models.fused_state import graft_fuse_head
from flexspec.models.registry import build_model
from flexspec.text import parse_graph, print_graph
from flexspec.types import DType
from repository import ROOT

CONFIG = ModelConfig("llama", 32, 16, 3, 2, 1, 8, 24, 1e-5, 64)


def test_llm_pipeline_leaves_no_fusible_operator() -> None:
    lowered = run_passes(build_model(CONFIG, DType.F32), LLM_PASSES)
    counts = Counter(node.op for node in lowered.nodes)
    assert counts == {
        "embedding": 1, "rms_norm": 7, "linear_group": 3, "split_heads": 9, "rope": 6, "attention": 3,
        "merge_heads": 3, "linear_add": 6, "linear_swiglu": 3, "select_rows": 1, "linear": 1,
    }  # fmt: skip
    assert {node.attr("mode") for node in lowered.nodes if node.op == "attention"} == {"tree_verify"}


def test_biased_mlp_falls_back_to_a_group() -> None:
    lowered = run_passes(build_model(replace(CONFIG, mlp_bias=True, qkv_bias=True), DType.F32), LLM_PASSES)
    groups = [(node.attr("count"), node.attr("biased")) for node in lowered.nodes if node.op == "linear_group"]
    assert groups == [(3, True), (2, True)] * 3


def test_experts_pass_through_between_fused_neighbours() -> None:
    """The router is no linear: it stays out of groups; a dense layer in between is fused as ever. Text parses back."""
    config = replace(CONFIG, family="qwen3_moe", qk_norm=True, experts=4, experts_per_token=2, expert_ffn_size=8)
    graph = build_model(replace(config, dense_layers=(1,)), DType.BF16)
    lowered = run_passes(graph, LLM_PASSES)
    counts = Counter(node.op for node in lowered.nodes)
    assert (counts["router"], counts["moe_experts"], counts["linear_swiglu"]) == (2, 2, 1)
    assert (counts["linear_group"], counts["linear_add"], counts["add"]) == (3, 4, 2)
    for each in (graph, lowered):
        again = parse_graph(print_graph(each))
        assert again == each and again.hash() == each.hash()
    assert build_model(config, DType.BF16).hash() != graph.hash()
    assert (
        build_model(replace(config, normalize_routing=True), DType.BF16).hash()
        != build_model(config, DType.BF16).hash()
    )


def test_ssm_pipeline_takes_incremental_steps() -> None:
    graph = build_model(replace(CONFIG, family="fused_state", layers=1), DType.F32, reduced_vocab_size=16)
    lowered = run_passes(graph, SSM_PASSES)
    assert {node.attr("mode") for node in lowered.nodes if node.op == "attention"} == {"incremental"}
    assert lowered.outputs == graph.outputs and lowered.inputs == graph.inputs


def test_passes_keep_the_contract_and_are_idempotent() -> None:
    graph = graft_fuse_head(build_model(CONFIG, DType.BF16, taps=(1, 2)))
    once = run_passes(graph, LLM_PASSES)
    assert once.inputs == graph.inputs and once.outputs == graph.outputs
    assert run_passes(once, LLM_PASSES) == once
    assert run_passes(graph, LLM_PASSES).hash() == once.hash() != graph.hash()


@pytest.mark.parametrize("name", dict.fromkeys(step.name for step in (*LLM_PASSES, *SSM_PASSES)))
def test_the_page_of_graphs_has_its_row(name: str) -> None:
    assert f"\n| `{name}` |" in (ROOT / "docs/design/graph.md").read_text()


def test_dumps_are_numbered_and_parse_back(tmp_path: Path) -> None:
    graph = build_model(CONFIG, DType.F32)
    lowered = run_passes(graph, LLM_PASSES, tmp_path / "ir")
    files = sorted((tmp_path / "ir").iterdir())
    names = ["input", *(step.name for step in LLM_PASSES)]
    assert [file.name for file in files] == [f"{number:02d}_{name}.fsg" for number, name in enumerate(names)]
    assert parse_graph(files[0].read_text()) == graph
    assert parse_graph(files[-1].read_text()) == lowered


def _drop_first(graph: Graph) -> Graph:
    return replace(graph, nodes=graph.nodes[1:])


def test_a_pass_that_breaks_the_graph_is_named(tmp_path: Path) -> None:
    passes = (*LLM_PASSES[:2], Pass("drop_first", _drop_first), *LLM_PASSES[2:])
    with pytest.raises(PassError, match="pass drop_first .number 3. broke the graph") as caught:
        run_passes(build_model(CONFIG, DType.F32), passes, tmp_path)
    assert "%embedding_0 used before its definition" in caught.value.found and "->" in caught.value.found
    assert [file.name for file in sorted(tmp_path.iterdir())][-1] == "03_drop_first.fsg"


def test_a_bad_input_graph_is_not_blamed_on_a_pass() -> None:
    with pytest.raises(GraphError, match="used before its definition"):
        run_passes(_drop_first(build_model(CONFIG, DType.F32)), LLM_PASSES)

"""The structural hash: stable across runs and renamings, and changed by anything that changes the computation."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model
from flexspec.ops.rope import RopeConfig
from flexspec.text import parse_graph, print_graph
from flexspec.types import DType
from flexspec.verifier import verify

CONFIG = ModelConfig("llama", 32, 16, 2, 2, 1, 8, 24, 1e-5, 64)


def test_hash_is_frozen() -> None:
    """Artifacts and caches are keyed by it: a change here is a format change and belongs in the changelog."""
    graph = build_model(CONFIG, DType.F32)
    assert graph.hash() == "14268cc070e36769437f491a1e9e428667efe4f2f417c0bcabda57d733199e4d"


def test_renaming_intermediate_values_and_the_graph_keeps_the_hash() -> None:
    graph = build_model(CONFIG, DType.F32)
    text = re.sub(r"%(\w+)_(\d+)\b", r"%v\2.\1", print_graph(graph)).replace("graph llm", "graph other")
    renamed = parse_graph(text)
    assert {v.name for v in renamed.values()} != {v.name for v in graph.values()}
    assert renamed.hash() == graph.hash()


def test_the_order_of_independent_nodes_keeps_the_hash() -> None:
    """Each projection split into heads at once (as Hugging Face's code runs), or all projections first."""
    graph = build_model(CONFIG, DType.F32)
    at = [node.op for node in graph.nodes].index("split_heads")
    q, k, v, split_q, split_k, split_v = graph.nodes[at - 3 : at + 3]
    shuffled = replace(
        graph, nodes=(*graph.nodes[: at - 3], v, split_v, q, split_q, k, split_k, *graph.nodes[at + 3 :])
    )
    verify(shuffled)
    assert shuffled != graph and shuffled.hash() == graph.hash()


def test_a_repeated_node_and_a_swapped_output_change_the_hash() -> None:
    graph = build_model(CONFIG, DType.F32)
    (extra,) = graph.nodes[1].outputs
    twice = replace(graph.nodes[1], outputs=(replace(extra, name="again"),))
    assert replace(graph, nodes=(*graph.nodes, twice)).hash() != graph.hash()
    assert replace(graph, outputs=graph.outputs[::-1]).hash() != graph.hash()


def test_step_inputs_may_be_renamed_weights_may_not() -> None:
    text = print_graph(build_model(CONFIG, DType.F32))
    assert parse_graph(text.replace("%ids_T", "%tokens_T")).hash() == parse_graph(text).hash()
    assert parse_graph(text.replace("%norm.weight", "%norm2.weight")).hash() != parse_graph(text).hash()


@pytest.mark.parametrize(
    ("old", "new"),
    [("eps=1e-05", "eps=1e-06"), ("f32[32,16]:weight", "f32[64,16]:weight"), ("= swiglu(", "= add(")],
)
def test_changes_of_meaning_change_the_hash(old: str, new: str) -> None:
    text = print_graph(build_model(CONFIG, DType.F32))
    assert old in text
    assert parse_graph(text.replace(old, new, 1)).hash() != parse_graph(text).hash()


def test_block_numbers_do_not_change_the_hash() -> None:
    """A front end that traces a model sees no blocks, and its graph is the same."""
    graph = build_model(CONFIG, DType.F32)
    bare = replace(graph, nodes=tuple(replace(node, block=None) for node in graph.nodes))
    assert bare != graph and bare.hash() == graph.hash()


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, tied_embeddings=True),
        replace(CONFIG, qkv_bias=True),
        replace(CONFIG, qk_norm=True),
        replace(CONFIG, max_positions=128),
        replace(CONFIG, rope=RopeConfig(theta=5e5)),
        replace(CONFIG, rope=RopeConfig(kind="linear", factor=2.0)),
    ],
)
def test_configurations_that_differ_hash_differently(config: ModelConfig) -> None:
    assert build_model(config, DType.F32).hash() != build_model(CONFIG, DType.F32).hash()


def test_fields_that_a_rope_kind_does_not_read_do_not_matter() -> None:
    noisy = replace(CONFIG, rope=RopeConfig(factor=8.0, low_freq_factor=2.0, original_max_positions=32))
    assert build_model(noisy, DType.F32).hash() == build_model(CONFIG, DType.F32).hash()


def test_integers_given_for_floats_do_not_matter() -> None:
    whole = replace(CONFIG, rope=RopeConfig(theta=10_000))
    assert build_model(whole, DType.F32).hash() == build_model(CONFIG, DType.F32).hash()

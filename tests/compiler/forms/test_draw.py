"""Drawings: repeated blocks are found and folded, every edge ends at a box that exists."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from flexspec.builder import GraphBuilder
from flexspec.compiler.forms.draw import Repeat, find_repeat, to_dot
from flexspec.compiler.forms.graph_json import graph_json
from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.graph import Graph
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model
from flexspec.types import DType

CONFIG = ModelConfig("llama", 40, 32, 6, 4, 2, 8, 48, 1e-5, 64)


def model(layers: int = 6) -> Graph:
    return build_model(replace(CONFIG, layers=layers), DType.F32)


def boxes(text: str) -> list[str]:
    return re.findall(r"^\s+([nio]\d+) \[", text, re.MULTILINE)


def edges(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^\s+([nio]\d+) -> ([nio]\d+) ", text, re.MULTILINE)


def test_layers_are_found() -> None:
    assert find_repeat(model()) == Repeat(1, 19, 6)
    assert find_repeat(run_passes(model(), LLM_PASSES)).count == 6
    assert find_repeat(model(1)).count == 1


def test_a_layer_that_differs_is_not_folded() -> None:
    graph = model()
    at = next(i for i, node in enumerate(graph.nodes) if node.op == "rms_norm" and i > 19 * 3)
    nodes = list(graph.nodes)
    nodes[at] = nodes[at].with_attr("eps", 0.5)
    repeat = find_repeat(replace(graph, nodes=tuple(nodes)))
    assert repeat.period == 19 and repeat.count == 3
    assert not repeat.start <= at < repeat.start + 3 * 19


def test_smallest_period_wins() -> None:
    b = GraphBuilder("chain", DType.F32)
    x = b.rms_norm(b.input("x_TE", ("T", 8)), b.weight("w", (8,)), 1e-5)
    for i in range(6):
        h = b.rms_norm(x, b.weight(f"norm{i}", (8,)), 1e-5)
        y = b.linear(h, b.weight(f"linear{i}", (8, 8)))
        x = b.add(x, b.swiglu(y, y))
    assert find_repeat(b.finish(x)) == Repeat(1, 4, 6)


def test_a_model_is_drawn_with_one_layer() -> None:
    text = to_dot(model())
    assert text == to_dot(model())
    assert 'label="x6"' in text
    drawn = boxes(text)
    assert len(drawn) == len(set(drawn))
    assert sum(box.startswith("n") for box in drawn) == 1 + 19 + 3
    assert {end for edge in edges(text) for end in edge} == set(drawn)
    assert text.count('xlabel="next"') == 2  # the state goes on to the norm and to the residual
    assert '[label="[T,4,8]", color="#1f5fa8"]' in text
    assert 'layers.0.k_cache\\nf32 [P,32,2,8]", shape=ellipse, color="#2e7d32"' in text
    assert "layers.1" not in text


def test_a_graph_without_repeats_is_drawn_whole() -> None:
    graph = model(1)
    text = to_dot(graph)
    assert sum(box.startswith("n") for box in boxes(text)) == len(graph.nodes)
    assert "cluster" not in text


def test_json_holds_the_whole_graph() -> None:
    graph = model(2)
    body = json.loads(graph_json(graph))
    assert body["hash"] == graph.hash()
    assert [value["name"] for value in body["inputs"]] == [value.name for value in graph.inputs]
    assert body["inputs"][0] == {"name": "ids_T", "dtype": "i32", "dims": ["T"], "role": "ids"}
    assert [node["op"] for node in body["nodes"]] == [node.op for node in graph.nodes]
    assert body["nodes"][1]["attrs"] == {"eps": 1e-5}
    assert body["outputs"] == list(graph.outputs)

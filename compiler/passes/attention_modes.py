"""Pass: write the attention mode. An LLM verifies trees, an SSM takes incremental steps; model files do not say."""

from __future__ import annotations

from dataclasses import replace

from flexspec.graph import Graph


def attention_modes(graph: Graph, mode: str) -> Graph:
    """Every attention of the graph with ``mode``: "tree_verify", "incremental" or "prefill"."""
    nodes = tuple(node.with_attr("mode", mode) if node.op == "attention" else node for node in graph.nodes)
    return replace(graph, nodes=nodes)

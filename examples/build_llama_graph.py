"""Build a Llama step graph by hand with the graph-building API, lower it, and run one step of a two-branch token tree.

    python examples/build_llama_graph.py

Legend: T rows of the step, E hidden, F ffn, V vocab, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from flexspec.builder import GraphBuilder, StepInputs
from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.graph import Graph, Value
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model, expected_weights
from flexspec.ops.rope import RopeConfig
from flexspec.runtime.executors.step import StepBatch
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.text import print_graph
from flexspec.tree import TokenTree
from flexspec.types import DType

V, E, F, H, G, D, LAYERS = 64, 32, 48, 4, 2, 8, 2
EPS, MAX_POSITIONS = 1e-5, 128


def layer(b: GraphBuilder, step: StepInputs, x_TE: Value, name: str) -> tuple[Value, Value, Value]:
    """One decoder layer: the new hidden state and the two written caches."""
    h = b.rms_norm(x_TE, b.weight(f"{name}.input_layernorm.weight", (E,)), EPS)
    q = b.split_heads(b.linear(h, b.weight(f"{name}.self_attn.q_proj.weight", (H * D, E))), H)
    k = b.split_heads(b.linear(h, b.weight(f"{name}.self_attn.k_proj.weight", (G * D, E))), G)
    v = b.split_heads(b.linear(h, b.weight(f"{name}.self_attn.v_proj.weight", (G * D, E))), G)
    q = b.rope(q, step.positions_T, RopeConfig(), MAX_POSITIONS)
    k = b.rope(k, step.positions_T, RopeConfig(), MAX_POSITIONS)
    caches = b.kv_cache(f"{name}.k_cache", G, D), b.kv_cache(f"{name}.v_cache", G, D)
    o, k_new, v_new = b.attention(q, k, v, *caches, step, scale=D**-0.5)
    x = b.add(x_TE, b.linear(b.merge_heads(o), b.weight(f"{name}.self_attn.o_proj.weight", (E, H * D))))
    h = b.rms_norm(x, b.weight(f"{name}.post_attention_layernorm.weight", (E,)), EPS)
    gate = b.linear(h, b.weight(f"{name}.mlp.gate_proj.weight", (F, E)))
    up = b.linear(h, b.weight(f"{name}.mlp.up_proj.weight", (F, E)))
    return b.add(x, b.linear(b.swiglu(gate, up), b.weight(f"{name}.mlp.down_proj.weight", (E, F)))), k_new, v_new


def build() -> Graph:
    """The complete step: ids in, logits of the wanted rows and the written caches out."""
    b = GraphBuilder("llm", DType.F32)
    step = b.step_inputs()
    x = b.embedding(step.ids_T, b.weight("embed_tokens.weight", (V, E)))
    caches: list[Value] = []
    for i in range(LAYERS):
        x, *written = layer(b, step, x, f"layers.{i}")
        caches += written
    rows = b.rms_norm(b.select_rows(x, step.logit_rows_L), b.weight("norm.weight", (E,)), EPS)
    return b.finish(b.linear(rows, b.weight("lm_head.weight", (V, E)), name="logits_LV"), *caches)


def tree_step(tree: TokenTree) -> StepBatch:
    """A step of one request with nothing committed, with logits of all rows of the tree."""
    n = len(tree)
    return StepBatch(
        ids_T=np.array(tree.tokens, np.int32),
        positions_T=np.array(tree.depths, np.int32),
        starts_R1=np.array([0, n], np.int32),
        contexts_R=np.zeros(1, np.int32),
        causal_R=np.zeros(1, np.uint8),
        page_table_RB=np.zeros((1, 1), np.int32),
        ancestors_TW=tree.ancestors(),
        logit_rows_L=np.arange(n, dtype=np.int32),
    )


def main() -> None:
    """Print the lowered graph and the next token after each node of the tree."""
    graph = build()
    library = build_model(ModelConfig("llama", V, E, LAYERS, H, G, D, F, EPS, MAX_POSITIONS), DType.F32)
    print(f"built by hand {graph.hash()[:12]}, by flexspec.models {library.hash()[:12]}")
    lowered = run_passes(graph, LLM_PASSES)
    print(print_graph(lowered))
    before, after = (Counter(node.op for node in g.nodes) for g in (graph, lowered))
    print(f"{before.total()} operators before the passes, {after.total()} after: {dict(sorted(after.items()))}")
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.3, dims).astype(np.float32) for name, dims in expected_weights(graph).items()}
    executor = ReferenceExecutor(lowered, weights, pages=1, max_rows=8)
    tree = TokenTree(tokens=(5, 7, 9, 7), parents=(-1, 0, 0, 2))
    for node, token in enumerate(executor.step(tree_step(tree), want_logits=False).argmax_L):
        print(f"node {node} (path {[tree.tokens[i] for i in tree.path(node)]}): next token {token}")


if __name__ == "__main__":
    main()

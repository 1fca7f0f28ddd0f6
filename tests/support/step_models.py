"""Small random models as step executors, and step batches over one request's pages, for kernel and engine tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.graph import Graph
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model, expected_weights
from flexspec.runtime.executors.cpu import CpuExecutor
from flexspec.runtime.executors.pages import RowGroup
from flexspec.tree import TokenTree
from flexspec.types import PAGE_TOKENS, DType

Weights = Mapping[str, NDArray[np.float32]]

CONFIG = ModelConfig(
    family="llama",
    vocab_size=203,
    hidden_size=96,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=16,
    ffn_size=80,
    norm_eps=1e-5,
    max_positions=256,
    tied_embeddings=True,
)


def tiny_config(**changes: object) -> ModelConfig:
    return replace(CONFIG, **changes)  # type: ignore[arg-type]


def random_weights(graph: Graph, seed: int = 0, scale: float = 0.3) -> dict[str, NDArray[np.float32]]:
    """Matrices of standard deviation ``scale`` and vectors of 1: sharp attention and varied text."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * (scale if len(shape) > 1 else 1.0)).astype(np.float32)
        for name, shape in expected_weights(graph).items()
    }


def tiny_llm(config: ModelConfig = CONFIG, dtype: DType = DType.F32, seed: int = 0) -> tuple[Graph, Weights]:
    graph = build_model(config, dtype)
    return graph, random_weights(graph, seed)


def on_cpu(graph: Graph, weights: Weights, *, pages: int = 16, max_rows: int = 96, threads: int = 1) -> CpuExecutor:
    """The graph lowered, generated and built for the best instruction set here (or FLEXSPEC_CPU_ISA)."""
    lowered = run_passes(graph, LLM_PASSES)
    return CpuExecutor.from_graph(lowered, weights.__getitem__, pages=pages, max_rows=max_rows, threads=threads)


def chain_rows(ids: Sequence[int], context: int, pages: Sequence[int], *, all_logits: bool = True) -> RowGroup:
    """A piece of a prompt, or one decoded token, behind ``context`` cached ones."""
    rows = range(len(ids)) if all_logits else [len(ids) - 1]
    return RowGroup(list(ids), range(context, context + len(ids)), context, pages, rows)


def tree_rows(tree: TokenTree, context: int, pages: Sequence[int]) -> RowGroup:
    """All nodes of a tree whose root is the token at position ``context``."""
    bits = [sum(1 << ancestor for ancestor in tree.path(node)) for node in range(len(tree))]
    positions = [context + depth for depth in tree.depths]
    return RowGroup(tree.tokens, positions, context, pages, range(len(tree)), bits)


def random_tree(rng: np.random.Generator, nodes: int, vocab: int, shape: str = "random") -> TokenTree:
    """``shape``: "random" parents, a "chain", a "star", or a "comb" (each level's last sibling goes on)."""
    parents = [-1]
    for i in range(1, nodes):
        parents.append({"random": int(rng.integers(0, i)), "chain": i - 1, "star": 0, "comb": (i - 1) // 3 * 3}[shape])
    return TokenTree(tuple(rng.integers(0, vocab, nodes).tolist()), tuple(parents))


def slots(pages: Sequence[int], logical: Sequence[int]) -> NDArray[np.int32]:
    """Pool slots of logical positions."""
    at = np.asarray(logical)
    found: NDArray[np.int32] = np.asarray(pages)[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
    return found.astype(np.int32)

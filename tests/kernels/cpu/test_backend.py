"""Generated CPU programs against the torch references of the same graphs, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from step_models import chain_rows, on_cpu, random_tree, random_weights, slots, tiny_config, tiny_llm, tree_rows

from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.models.config import ModelConfig
from flexspec.models.fused_state import graft_fuse_head
from flexspec.models.registry import build_model
from flexspec.ops.record import record_of
from flexspec.ops.rope import RopeConfig
from flexspec.runtime.executors.pages import RowGroup, pack_rows
from flexspec.runtime.executors.step import Executor
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.types import DType

TOLERANCE = 1e-4  # of logits around 10
CONFIGS = {
    "llama_d16_group3": tiny_config(),
    "qwen2_bias_d64_group1": tiny_config(
        family="qwen2", heads=2, kv_heads=2, head_dim=64, qkv_bias=True, vocab_size=130, ffn_size=50
    ),
    "qwen3_qk_norm_d80_one_kv_head": tiny_config(
        family="qwen3", heads=3, kv_heads=1, head_dim=80, qk_norm=True, tied_embeddings=False, hidden_size=70
    ),
    "llama3_rope_d128_group8": tiny_config(
        heads=8,
        kv_heads=1,
        head_dim=128,
        layers=1,
        mlp_bias=False,
        rope=RopeConfig(theta=500.0, kind="llama3", factor=4.0, original_max_positions=64),
    ),  # fmt: skip
    "all_biases_d96_group20": tiny_config(
        heads=20,
        kv_heads=1,
        head_dim=96,
        layers=1,
        qkv_bias=True,
        output_bias=True,
        vocab_size=33,
        hidden_size=33,
        ffn_size=17,
    ),  # fmt: skip
}


class Pair:
    """The same model twice; every step must agree."""

    def __init__(self, tested: Executor, oracle: Executor) -> None:
        self.tested, self.oracle = tested, oracle

    def step(self, *groups: RowGroup) -> None:
        batch = pack_rows(groups)
        got = self.tested.step(batch, want_logits=True)
        expected = self.oracle.step(batch, want_logits=True)
        assert got.logits_LV is not None and expected.logits_LV is not None
        scale = max(1.0, float(np.abs(expected.logits_LV).max()) / 10)
        np.testing.assert_allclose(got.logits_LV, expected.logits_LV, atol=TOLERANCE * scale, rtol=0)
        np.testing.assert_array_equal(got.argmax_L, got.logits_LV.argmax(-1))
        assert (got.features_TE is None) == (expected.features_TE is None)
        if got.features_TE is not None and expected.features_TE is not None:
            np.testing.assert_allclose(got.features_TE, expected.features_TE, atol=TOLERANCE * 10, rtol=0)

    def gather(self, pages: Sequence[int], context: int, path: Sequence[int]) -> None:
        moved = [(context + node, context + i) for i, node in enumerate(path) if node != i]
        for executor in (self.tested, self.oracle):
            executor.move_kv(slots(pages, [a for a, _ in moved]), slots(pages, [b for _, b in moved]))


@pytest.mark.parametrize("name", CONFIGS)
def test_generated_program_equals_the_reference(name: str) -> None:
    config: ModelConfig = CONFIGS[name]
    graph, weights = tiny_llm(config)
    pair = Pair(on_cpu(graph, weights, threads=2), ReferenceExecutor(graph, weights, pages=16, max_rows=96))
    rng = np.random.default_rng(1)
    ids = rng.integers(0, config.vocab_size, 400).tolist()
    first, second = [9, 1, 5, 7, 0], [3, 2, 15, 4, 8]
    pair.step(chain_rows(ids[:1], 0, first))
    pair.step(chain_rows(ids[1:31], 1, first))  # ends one token before a page edge
    pair.step(chain_rows(ids[31:32], 31, first), chain_rows(ids[100:140], 0, second))
    pair.step(chain_rows(ids[32:61], 32, first), tree_rows(random_tree(rng, 30, config.vocab_size), 40, second))
    for shape, nodes in (("star", 2), ("chain", 17), ("random", 65), ("comb", 34)):
        tree = random_tree(rng, nodes, config.vocab_size, shape)
        other = random_tree(rng, 5, config.vocab_size)
        pair.step(tree_rows(tree, 61, first), tree_rows(other, 40, second), chain_rows(ids[200:216], 0, [6]))
    path = tree.path(33)
    pair.gather(first, 61, path)
    pair.step(chain_rows([7], 61 + len(path), first))


def test_features_of_a_fuse_head_and_the_ssm_that_reads_them() -> None:
    config = tiny_config(layers=3)
    graph = graft_fuse_head(build_model(config, DType.F32, taps=(1, 2)))
    weights = random_weights(graph)
    llm = Pair(on_cpu(graph, weights, threads=2), ReferenceExecutor(graph, weights, pages=16, max_rows=96))
    rng = np.random.default_rng(2)
    ids = rng.integers(0, config.vocab_size, 50).tolist()
    llm.step(chain_rows(ids, 0, [3, 1, 2], all_logits=False))
    llm.step(tree_rows(random_tree(rng, 20, config.vocab_size), 50, [3, 1, 2]))

    ssm_config = tiny_config(family="fused_state", layers=1)
    graph = build_model(ssm_config, DType.F32, reduced_vocab_size=77)
    weights = random_weights(graph)
    ssm = Pair(on_cpu(graph, weights), ReferenceExecutor(graph, weights, pages=16, max_rows=96))
    tree = tree_rows(random_tree(rng, 9, config.vocab_size), 40, [5, 6])
    for group in (chain_rows(ids[:40], 0, [5, 6]), tree):
        features = list(rng.standard_normal((len(group.ids), config.hidden_size)).astype(np.float32))
        ssm.step(replace(group, features=features))


@pytest.mark.parametrize("threads", [1, 2])
def test_stamps_follow_the_step_and_change_nothing(threads: int) -> None:
    graph, weights = tiny_llm(CONFIGS["llama_d16_group3"])
    graph = run_passes(graph, LLM_PASSES)
    executor = on_cpu(graph, weights, threads=threads)
    batch = pack_rows([chain_rows(list(range(20)), 0, [1, 2])])
    before = executor.step(batch, want_logits=True)
    times = executor.keep_times(len(graph.nodes))
    steps = [executor.step(batch, want_logits=True) for _ in range(3)]
    assert all(np.array_equal(step.logits_LV, before.logits_LV) for step in steps)
    calls, stamps = (times.arrays()[key] for key in ("calls", "stamps"))
    assert calls.shape == (3, 2) and stamps.shape == (3, 1 + len(graph.nodes))
    assert (np.diff(stamps, axis=1) >= 0).all() and (calls[1:, 0] >= calls[:-1, 1]).all()
    assert (calls[:, 0] <= stamps[:, 0]).all() and (stamps[:, -1] <= calls[:, 1]).all()
    views = [i for i, node in enumerate(graph.nodes) if record_of(node).kernel.cpu == "view"]
    assert views and (np.diff(stamps, axis=1)[:, views] == 0).all()
    working = [i for i, node in enumerate(graph.nodes) if node.op.startswith("linear")]
    assert (np.diff(stamps, axis=1)[:, working] > 0).all()

"""The hidden-state SSM and the fuse head, against transformers' layers and plain torch.

Legend: T rows, E hidden.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from flexspec.compiler.passes.pipeline import LLM_PASSES, SSM_PASSES, run_passes
from flexspec.errors import GraphError, ModelConfigError
from flexspec.models.config import ModelConfig
from flexspec.models.fused_state import build_fused_state, graft_fuse_head
from flexspec.models.registry import build_model, expected_weights
from flexspec.runtime.executors.step import StepBatch
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.tree import TokenTree
from flexspec.types import DType

CONFIG = ModelConfig("fused_state", 40, 32, 1, 4, 2, 8, 48, 1e-5, 64)
PAGES = np.array([[1, 0]], np.int32)


def random_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {name: rng.normal(len(s) == 1, 0.25, s).astype(np.float32) for name, s in shapes.items()}


def chain_batch(tokens: list[int], features: np.ndarray | None = None) -> StepBatch:
    n = len(tokens)
    return StepBatch(
        ids_T=np.array(tokens, np.int32), positions_T=np.arange(n, dtype=np.int32),
        starts_R1=np.array([0, n], np.int32), contexts_R=np.zeros(1, np.int32), causal_R=np.ones(1, np.uint8),
        page_table_RB=PAGES, ancestors_TW=np.zeros((n, 1), np.uint64), logit_rows_L=np.arange(n, dtype=np.int32),
        features_TE=features,
    )  # fmt: skip


def rms(x: torch.Tensor, weight: np.ndarray) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * torch.from_numpy(weight)


def expected(weights: dict[str, np.ndarray], tokens: list[int], features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(logits, final state) through a transformers LlamaModel fed with the fused input."""
    hf = transformers.LlamaModel(
        transformers.LlamaConfig(
            vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, rms_norm_eps=1e-5, max_position_embeddings=64, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    own = {name: torch.from_numpy(weights[name]) for name in hf.state_dict()}
    hf.load_state_dict(own)
    embedded = torch.from_numpy(weights["embed_tokens.weight"])[tokens]
    x = rms(embedded, weights["norm_embed.weight"]) @ torch.from_numpy(weights["fc_embed.weight"]).T
    x = (
        x
        + rms(torch.from_numpy(features), weights["norm_feature.weight"])
        @ torch.from_numpy(weights["fc_feature.weight"]).T
    )
    with torch.no_grad():
        state = hf(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
    return (state @ torch.from_numpy(weights["lm_head.weight"]).T).numpy(), state.numpy()


@pytest.mark.parametrize("lowered", [False, True], ids=["canonical", "lowered"])
def test_ssm_against_transformers(lowered: bool) -> None:
    graph = build_model(CONFIG, DType.F32, reduced_vocab_size=24)
    assert graph.outputs == ("logits_LV", "tap0_TE", "layers.0.k_cache.new", "layers.0.v_cache.new")
    graph = run_passes(graph, SSM_PASSES) if lowered else graph
    weights = random_weights(expected_weights(graph))
    assert weights["lm_head.weight"].shape == (24, 32) and weights["embed_tokens.weight"].shape == (40, 32)
    tokens = list(range(1, 36))
    features = np.random.default_rng(0).normal(size=(35, 32)).astype(np.float32)
    executor = ReferenceExecutor(graph, weights, pages=2, max_rows=64)
    assert executor.vocab_size == 24 and executor.max_positions == 64
    found = executor.step(chain_batch(tokens, features), want_logits=True)
    logits, state = expected(weights, tokens, features)
    np.testing.assert_allclose(found.logits_LV, logits, rtol=0, atol=1e-4)
    np.testing.assert_allclose(found.features_TE, state, rtol=0, atol=1e-4)


def test_drafting_depths_feed_the_state_back() -> None:
    """Two draft steps behind a prefill, the second fed with the first's state, equal one causal pass over all rows."""
    graph = build_fused_state(CONFIG, DType.F32, reduced_vocab_size=24)
    weights = random_weights(expected_weights(graph))
    features = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
    executor = ReferenceExecutor(graph, weights, pages=2, max_rows=64)
    state = executor.step(chain_batch([1, 2, 3, 4], features), want_logits=False).features_TE
    fed = [*features]
    for depth, token in enumerate((5, 6)):
        assert state is not None
        fed.append(state[-1])
        batch = StepBatch(
            ids_T=np.array([token], np.int32), positions_T=np.array([4 + depth], np.int32),
            starts_R1=np.array([0, 1], np.int32), contexts_R=np.array([4 + depth], np.int32),
            causal_R=np.zeros(1, np.uint8), page_table_RB=PAGES, ancestors_TW=TokenTree.root_only(token).ancestors(),
            logit_rows_L=np.zeros(1, np.int32), features_TE=state[-1:],
        )  # fmt: skip
        result = executor.step(batch, want_logits=True)
        state = result.features_TE
    logits, _ = expected(weights, [1, 2, 3, 4, 5, 6], np.stack(fed))
    np.testing.assert_allclose(result.logits_LV[0], logits[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("taps", [(1,), (1, 2)])
def test_fuse_head_sums_the_normed_taps(taps: tuple[int, ...]) -> None:
    config = ModelConfig("llama", 40, 32, 3, 4, 2, 8, 48, 1e-5, 64)
    plain = build_model(config, DType.F32, taps=taps)
    grafted = graft_fuse_head(plain)
    assert grafted.outputs[:2] == ("logits_LV", "features_TE")
    assert grafted.outputs[2:] == plain.outputs[2 + len(taps) :]
    weights = random_weights(expected_weights(grafted))
    extra = set(weights) - set(expected_weights(plain))
    last = len(taps)
    assert extra == {f"fuse.norms.{i}.weight" for i in range(last)} | {f"fuse.taps.{i}.weight" for i in range(last + 1)}
    batch = chain_batch([3, 1, 4, 1, 5])
    states = ReferenceExecutor(plain, weights, pages=2, max_rows=8).step(batch, want_logits=True)
    parts = [torch.from_numpy(part) for part in np.split(states.features_TE, last + 1, -1)]
    normed = [rms(part, weights[f"fuse.norms.{i}.weight"]) for i, part in enumerate(parts[:-1])] + parts[-1:]
    wanted = sum(x @ torch.from_numpy(weights[f"fuse.taps.{i}.weight"]).T for i, x in enumerate(normed))
    for graph in (grafted, run_passes(grafted, LLM_PASSES)):
        found = ReferenceExecutor(graph, weights, pages=2, max_rows=8).step(batch, want_logits=True)
        np.testing.assert_allclose(found.features_TE, wanted.numpy(), rtol=0, atol=1e-4)
        np.testing.assert_allclose(found.logits_LV, states.logits_LV, rtol=0, atol=1e-4)


def test_refusals() -> None:
    with pytest.raises(GraphError, match="at least two"):
        graft_fuse_head(build_model(ModelConfig("llama", 40, 32, 1, 4, 2, 8, 48, 1e-5, 64), DType.F32))
    with pytest.raises(ModelConfigError, match="reduced_vocab_size=41"):
        build_fused_state(CONFIG, DType.F32, reduced_vocab_size=41)

"""Model files: refusals, expected weights, and that a new family is one new file."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import flexspec.models
from flexspec.errors import ModelConfigError
from flexspec.models import registry
from flexspec.models.config import ModelConfig, RopeConfig
from flexspec.models.llama import check_sliding_window
from flexspec.models.registry import build_model, expected_weights, families
from flexspec.types import DType

CONFIG = ModelConfig("llama", 32, 16, 2, 4, 2, 8, 24, 1e-5, 64)

NEW_FAMILY = '''
from flexspec.builder import GraphBuilder
from flexspec.models.registry import register_family


def build_bigram(config, dtype, *, name="bigram"):
    """Next-token logits from the current token alone."""
    b = GraphBuilder(name, dtype)
    step = b.step_inputs()
    x = b.embedding(step.ids_T, b.weight("embed_tokens.weight", (config.vocab_size, config.hidden_size)))
    head = b.weight("lm_head.weight", (config.vocab_size, config.hidden_size))
    return b.finish(b.linear(b.select_rows(x, step.logit_rows_L), head, name="logits_LV"))


register_family("bigram", build_bigram)
'''


def test_a_family_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bigram.py").write_text(NEW_FAMILY)
    monkeypatch.setattr(registry, "_FAMILIES", dict(families()))
    monkeypatch.setattr(flexspec.models, "__path__", [*flexspec.models.__path__, str(tmp_path)])
    graph = build_model(replace(CONFIG, family="bigram"), DType.F32)
    monkeypatch.delitem(sys.modules, "flexspec.models.bigram")
    assert [node.op for node in graph.nodes] == ["embedding", "select_rows", "linear"]


def test_families() -> None:
    assert set(families()) == {"fused_state", "llama", "mistral", "qwen2", "qwen3"}
    with pytest.raises(ModelConfigError, match="one of llama"):
        build_model(replace(CONFIG, family="llama4"), DType.F32)


def test_expected_weights() -> None:
    weights = expected_weights(build_model(CONFIG, DType.F32))
    assert len(weights) == 3 + 2 * 9
    assert weights["layers.1.self_attn.k_proj.weight"] == (16, 16)
    assert weights["layers.0.mlp.down_proj.weight"] == (16, 24)
    assert weights["embed_tokens.weight"] == weights["lm_head.weight"] == (32, 16)
    biased = expected_weights(build_model(replace(CONFIG, qkv_bias=True, qk_norm=True), DType.F32))
    assert biased["layers.0.self_attn.q_proj.bias"] == (32,) and biased["layers.0.self_attn.q_norm.weight"] == (8,)
    assert "lm_head.weight" not in expected_weights(build_model(replace(CONFIG, tied_embeddings=True), DType.F32))


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, layers=0),
        replace(CONFIG, kv_heads=3),
        replace(CONFIG, head_dim=7),
        replace(CONFIG, norm_eps=0.0),
        replace(CONFIG, rope=RopeConfig(kind="dynamic")),
        replace(CONFIG, rope=RopeConfig(kind="yarn", factor=4.0)),
        replace(CONFIG, rope=RopeConfig(theta=0.0)),
    ],
)
def test_bad_configurations_are_refused(config: ModelConfig) -> None:
    with pytest.raises(ModelConfigError):
        build_model(config, DType.F32)


@pytest.mark.parametrize("taps", [(2, 1), (1, 1), (3,), (-1,)])
def test_bad_taps_are_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(ModelConfigError, match="increasing numbers of layers"):
        build_model(CONFIG, DType.F32, taps=taps)


def test_sliding_window_shorter_than_the_context_is_refused() -> None:
    for window in (None, 0, 64, 4096):
        check_sliding_window(window, 64)
    with pytest.raises(ModelConfigError, match="sliding_window=32"):
        check_sliding_window(32, 64)

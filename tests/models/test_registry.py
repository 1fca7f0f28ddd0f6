"""Model files: refusals, expected weights, and that a new family is one new file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import flexspec.models
from flexspec.compiler.frontends.huggingface import read_config
from flexspec.compiler.frontends.settings import Settings, check_sliding_window
from flexspec.errors import ModelConfigError
from flexspec.models import registry
from flexspec.models.config import ModelConfig, check_config
from flexspec.models.registry import build_model, expected_weights, families
from flexspec.ops.rope import RopeConfig
from flexspec.types import DType

CONFIG = ModelConfig("llama", 32, 16, 2, 4, 2, 8, 24, 1e-5, 64)

NEW_FAMILY = '''
from flexspec.builder import GraphBuilder
from flexspec.models.config import Checkpoint
from flexspec.models.registry import register_family


def build_bigram(config, dtype, *, name="bigram"):
    """Next-token logits from the current token alone."""
    b = GraphBuilder(name, dtype)
    step = b.step_inputs()
    x = b.embedding(step.ids_T, b.weight("embed_tokens.weight", (config.vocab_size, config.hidden_size)))
    head = b.weight("lm_head.weight", (config.vocab_size, config.hidden_size))
    return b.finish(b.linear(b.select_rows(x, step.logit_rows_L), head, name="logits_LV"))


register_family("bigram", build_bigram, {"BigramForCausalLM": Checkpoint(positions=64, activations=("gelu",))})
'''


@pytest.fixture
def bigram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A family in a file of its own, gone afterwards."""
    (tmp_path / "bigram.py").write_text(NEW_FAMILY)
    monkeypatch.setattr(registry, "_FAMILIES", dict(families()))
    monkeypatch.setattr(registry, "_ARCHITECTURES", dict(registry.architectures()))
    monkeypatch.setattr(flexspec.models, "__path__", [*flexspec.models.__path__, str(tmp_path)])
    yield
    sys.modules.pop("flexspec.models.bigram", None)


def test_a_family_is_one_file(bigram: None) -> None:
    graph = build_model(replace(CONFIG, family="bigram"), DType.F32)
    assert [node.op for node in graph.nodes] == ["embedding", "select_rows", "linear"]


def test_an_option_the_family_lacks_is_refused(bigram: None) -> None:
    with pytest.raises(ModelConfigError, match="family bigram offers no taps"):
        build_model(replace(CONFIG, family="bigram"), DType.F32, taps=(1,))


def test_the_loader_knows_the_checkpoints_of_a_new_family(bigram: None, tmp_path: Path) -> None:
    settings = {
        "architectures": ["BigramForCausalLM"], "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 24,
    }  # fmt: skip
    path = tmp_path / "config.json"
    config, name = read_config(Settings(settings, path), path)
    assert (config.family, config.max_positions, name) == ("bigram", 64, "BigramForCausalLM")
    settings["hidden_act"] = "silu"
    with pytest.raises(ModelConfigError, match="gelu"):
        read_config(Settings(settings, path), path)


def test_families() -> None:
    assert {"fused_state", "llama", "mistral", "qwen2", "qwen3"} <= set(families())
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
        replace(CONFIG, norm_eps=0.0),
        replace(CONFIG, rope=RopeConfig(kind="dynamic")),
        replace(CONFIG, rope=RopeConfig(kind="yarn", factor=4.0)),
        replace(CONFIG, rope=RopeConfig(theta=0.0)),
    ],
)
def test_bad_configurations_are_refused(config: ModelConfig) -> None:
    with pytest.raises(ModelConfigError, match="FS201: the configuration has ") as built:
        build_model(config, DType.F32)
    with pytest.raises(ModelConfigError, match="FS201: dir/config.json has ") as loaded:
        check_config(config, "dir/config.json")
    assert built.value.expected == loaded.value.expected, "loaders and builders say the same"


@pytest.mark.parametrize("taps", [(2, 1), (1, 1), (3,), (-1,)])
def test_bad_taps_are_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(ModelConfigError, match="increasing numbers of layers"):
        build_model(CONFIG, DType.F32, taps=taps)


def test_sliding_window_shorter_than_the_context_is_refused() -> None:
    for window in (None, 0, 64, 4096):
        check_sliding_window(window, 64)
    with pytest.raises(ModelConfigError, match="sliding_window=32"):
        check_sliding_window(32, 64)

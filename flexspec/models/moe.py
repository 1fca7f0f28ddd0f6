"""Decoders whose MLP is a mixture of experts: Mixtral, and Qwen3-MoE, which also normalises q and k.

Otherwise they are Llamas. Layers of ``dense_layers`` have one MLP. Shared experts, which every row uses, are refused.
"""

from __future__ import annotations

from dataclasses import replace

from flexspec.builder import GraphBuilder
from flexspec.graph import Graph, Value
from flexspec.models.config import Checkpoint, ConfigKeys, ModelConfig, bad_config
from flexspec.models.llama import build_decoder, swiglu_mlp
from flexspec.models.registry import register_family
from flexspec.types import DType

_SHARED = ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size")
_MAX_LAYERS = 4096  # a damaged file may have any number


def build_moe(config: ModelConfig, dtype: DType, *, taps: tuple[int, ...] = (), name: str = "llm") -> Graph:
    """One step of the model, ``taps`` as in llama.py. Raises ModelConfigError for a contradictory configuration."""
    _check_experts(config)
    return build_decoder(
        config, dtype, lambda layer: swiglu_mlp if layer in config.dense_layers else moe_mlp, taps=taps, name=name
    )


def moe_mlp(b: GraphBuilder, config: ModelConfig, h_TE: Value, part: str) -> Value:
    """The weighted sum of each row's experts, [T,E]; ``part`` is the weights' prefix."""
    wide = (config.experts, config.expert_ffn_size, config.hidden_size)
    narrow = (config.experts, config.hidden_size, config.expert_ffn_size)
    routing_TX = b.router(
        h_TE,
        b.weight(f"{part}.gate.weight", (config.experts, config.hidden_size)),
        config.experts_per_token,
        normalize=config.normalize_routing,
    )
    gate, up, down = (
        b.weight(f"{part}.experts.{name}_proj.weight", dims)
        for name, dims in (("gate", wide), ("up", wide), ("down", narrow))
    )
    return b.moe_experts(h_TE, routing_TX, gate, up, down, config.experts_per_token)


def _check_experts(config: ModelConfig) -> None:
    for field in ("experts", "experts_per_token", "expert_ffn_size"):
        if getattr(config, field) <= 0:
            raise bad_config(f"{field}={getattr(config, field)}", "a size above 0")
    if config.experts_per_token > config.experts:
        raise bad_config(f"experts_per_token={config.experts_per_token}", f"at most experts={config.experts}")


def _read_mixtral(keys: ConfigKeys, config: ModelConfig) -> ModelConfig:
    """Here intermediate_size is that of an expert; routing weights always sum to 1."""
    return _mixture(keys, config, "num_local_experts", 8, 2, config.ffn_size, normalize=True)


def _read_qwen3_moe(keys: ConfigKeys, config: ModelConfig) -> ModelConfig:
    """Dense are the layers of ``mlp_only_layers``, and all but every ``decoder_sparse_step``-th."""
    ffn = keys.integer("moe_intermediate_size", 768)
    step, listed = keys.integer("decoder_sparse_step", 1), frozenset(keys.integers("mlp_only_layers"))
    if config.layers > _MAX_LAYERS:
        raise keys.error("num_hidden_layers", f"at most {_MAX_LAYERS} layers")
    if max(listed, default=0) >= config.layers:
        raise keys.error("mlp_only_layers", f"layers below {config.layers}")
    dense = tuple(layer for layer in range(config.layers) if layer in listed or (layer + 1) % step)
    if len(dense) == config.layers:
        raise keys.error(
            "mlp_only_layers" if listed else "decoder_sparse_step", "at least one layer with experts", "use a Qwen3"
        )
    normalize = keys.flag("norm_topk_prob", False)
    return replace(_mixture(keys, config, "num_experts", 128, 8, ffn, normalize=normalize), dense_layers=dense)


def _mixture(
    keys: ConfigKeys, config: ModelConfig, name: str, experts: int, chosen: int, ffn: int, *, normalize: bool
) -> ModelConfig:
    """``experts`` and ``chosen`` are the defaults; ``name`` is the older key for their number."""
    for shared in _SHARED:
        if keys.raw(shared):
            raise keys.error(shared, "no shared experts", "use a model whose router chooses among all experts")
    count = keys.integer("num_local_experts", keys.integer(name, experts))  # transformers 5 writes this for all
    if keys.integer(name, count) != count:
        raise keys.error(name, f"num_local_experts, {count}")
    chosen = keys.integer("num_experts_per_tok", chosen)
    if chosen > count:
        raise keys.error("num_experts_per_tok", f"at most the number of experts, {count}")
    return replace(config, experts=count, experts_per_token=chosen, expert_ffn_size=ffn, normalize_routing=normalize)


_OURS = tuple(f"mlp.experts.{name}_proj.weight" for name in ("gate", "down", "up"))  # w1, w2 and w3 of Mixtral

register_family(
    "mixtral",
    build_moe,
    {
        "MixtralForCausalLM": Checkpoint(
            131_072,
            kv_heads=8,
            window=0,  # none by default, but config.json may set one
            norm_eps=1e-5,
            rope_theta=1e6,
            read=_read_mixtral,
            stored_names=(
                ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
                *((f"block_sparse_moe.experts.{{x}}.w{i + 1}.weight", ours) for i, ours in enumerate(_OURS)),
            ),
        )
    },
)
register_family(
    "qwen3_moe",
    build_moe,
    {
        "Qwen3MoeForCausalLM": Checkpoint(
            32_768,
            qk_norm=True,
            kv_heads=4,
            window=4096,
            window_is_optional=True,
            read=_read_qwen3_moe,
            stored_names=tuple((name.replace("experts.", "experts.{x}."), name) for name in _OURS),
        )
    },
)

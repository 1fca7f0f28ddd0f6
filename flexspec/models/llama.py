"""Llama and the families that differ from it by switches: Llama 2/3, SmolLM2, Mistral, Qwen2/2.5 and Qwen3."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from flexspec.builder import GraphBuilder, StepInputs
from flexspec.graph import Graph, Value
from flexspec.models.config import Checkpoint, ModelConfig, bad_config, check_config
from flexspec.models.registry import register_family
from flexspec.types import DType

Mlp = Callable[[GraphBuilder, ModelConfig, Value, str], Value]  # (builder, config, rows [T,E], prefix) -> [T,E]
Embed = Callable[[GraphBuilder, StepInputs, ModelConfig, str], Value]  # (builder, inputs, config, name) -> [T,E]


def build_llama(config: ModelConfig, dtype: DType, *, taps: tuple[int, ...] = (), name: str = "llm") -> Graph:
    """One step of the model. Raises ModelConfigError for a contradictory configuration.

    ``taps``: increasing numbers of layers (0: the embedding) after which the hidden state [T,E] is an output too; if
    there are any, the final normed state follows as the last tap.
    """
    return build_decoder(config, dtype, lambda layer: swiglu_mlp, taps=taps, name=name)


def embed_tokens(b: GraphBuilder, step: StepInputs, config: ModelConfig, name: str) -> Value:
    """The embedding rows of the step's tokens, [T,E], named ``name``."""
    return b.embedding(step.ids_T, b.weight("embed_tokens.weight", embedding_dims(config)), name=name)


def build_decoder(
    config: ModelConfig,
    dtype: DType,
    mlp_of: Callable[[int], Mlp],
    *,
    embed: Embed = embed_tokens,
    rotary: bool = True,
    taps: tuple[int, ...] = (),
    name: str = "llm",
) -> Graph:
    """Like :func:`build_llama`, for families that differ from it in a part.

    ``mlp_of(layer)`` is the MLP of a layer. ``embed`` computes the rows that enter the first layer. A family with
    learned positions adds them there, and passes ``rotary=False``: q and k are not rotated.
    """
    check_config(config)
    _check_taps(config, taps)
    b = GraphBuilder(name, dtype)
    step = b.step_inputs()
    names = {layers: f"tap{i}_TE" for i, layers in enumerate(taps)}
    x = embed(b, step, config, names.get(0, ""))
    tapped = [x] if 0 in names else []
    caches: list[Value] = []
    for i in range(config.layers):
        with b.block(i):
            x, *new = decoder_layer(
                b, step, config, x, f"layers.{i}", mlp=mlp_of(i), rotary=rotary, name=names.get(i + 1, "")
            )
        caches += new
        tapped += [x] if i + 1 in names else []
    norm = b.weight("norm.weight", (config.hidden_size,))
    if taps:
        x = b.rms_norm(x, norm, config.norm_eps, name=f"tap{len(taps)}_TE")
        rows = b.select_rows(x, step.logit_rows_L)
        tapped.append(x)
    else:
        rows = b.rms_norm(b.select_rows(x, step.logit_rows_L), norm, config.norm_eps)
    head = b.weight("embed_tokens.weight" if config.tied_embeddings else "lm_head.weight", embedding_dims(config))
    return b.finish(b.linear(rows, head, name="logits_LV"), *tapped, *caches)


def build_block(config: ModelConfig, dtype: DType, *, name: str = "block") -> Graph:
    """One decoder layer alone, ``layers.0``: reads ``x_TE`` in place of the embedding; outputs y [T,E] and the caches.

    It has every step input, so that executors can feed it like a model. Raises ModelConfigError.
    """
    check_config(config)
    b = GraphBuilder(name, dtype)
    step = b.step_inputs()
    x = b.input("x_TE", ("T", config.hidden_size))
    with b.block(0):
        return b.finish(*decoder_layer(b, step, config, x, "layers.0", name="y_TE"))


def embedding_dims(config: ModelConfig) -> tuple[int, int]:
    """[V,E] of the embedding and the LM head."""
    return config.vocab_size, config.hidden_size


def swiglu_mlp(b: GraphBuilder, config: ModelConfig, h_TE: Value, part: str) -> Value:
    """down(silu(gate(h)) * up(h)), [T,E]; ``part`` is the weights' prefix."""
    gate = linear(b, h_TE, f"{part}.gate_proj", config.ffn_size, config.mlp_bias)
    up = linear(b, h_TE, f"{part}.up_proj", config.ffn_size, config.mlp_bias)
    return linear(b, b.swiglu(gate, up), f"{part}.down_proj", config.hidden_size, config.mlp_bias)


def decoder_layer(
    b: GraphBuilder,
    step: StepInputs,
    config: ModelConfig,
    x_TE: Value,
    prefix: str,
    *,
    mlp: Mlp = swiglu_mlp,
    rotary: bool = True,
    name: str = "",
) -> tuple[Value, Value, Value]:
    """Attention and MLP with their residuals: (x [T,E] named ``name``, new k cache, new v cache).

    A family whose MLP differs passes its own ``mlp``, which reads the normed rows. ``rotary``: q and k are rotated.
    """
    h = b.rms_norm(x_TE, b.weight(f"{prefix}.input_layernorm.weight", (config.hidden_size,)), config.norm_eps)
    attended, k_new, v_new = _attention(b, step, config, h, prefix, rotary=rotary)
    x = b.add(x_TE, attended)
    h = b.rms_norm(x, b.weight(f"{prefix}.post_attention_layernorm.weight", (config.hidden_size,)), config.norm_eps)
    return b.add(x, mlp(b, config, h, f"{prefix}.mlp"), name=name), k_new, v_new


def _attention(
    b: GraphBuilder, step: StepInputs, config: ModelConfig, h_TE: Value, prefix: str, *, rotary: bool
) -> tuple[Value, Value, Value]:
    part = f"{prefix}.self_attn"
    q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    q = linear(b, h_TE, f"{part}.q_proj", q_width, config.qkv_bias)
    k = linear(b, h_TE, f"{part}.k_proj", kv_width, config.qkv_bias)
    v = linear(b, h_TE, f"{part}.v_proj", kv_width, config.qkv_bias)
    q, k, v = b.split_heads(q, config.heads), b.split_heads(k, config.kv_heads), b.split_heads(v, config.kv_heads)
    if config.qk_norm:
        q = b.rms_norm(q, b.weight(f"{part}.q_norm.weight", (config.head_dim,)), config.norm_eps)
        k = b.rms_norm(k, b.weight(f"{part}.k_norm.weight", (config.head_dim,)), config.norm_eps)
    if rotary:
        if config.head_dim % 2:
            raise bad_config(f"the configuration has head dim {config.head_dim}", "an even head dim (rotary pairs)")
        q = b.rope(q, step.positions_T, config.rope, config.max_positions)
        k = b.rope(k, step.positions_T, config.rope, config.max_positions)
    k_cache = b.kv_cache(f"{prefix}.k_cache", config.kv_heads, config.head_dim)
    v_cache = b.kv_cache(f"{prefix}.v_cache", config.kv_heads, config.head_dim)
    o, k_new, v_new = b.attention(q, k, v, k_cache, v_cache, step, config.head_dim**-0.5)
    return linear(b, b.merge_heads(o), f"{part}.o_proj", config.hidden_size, config.output_bias), k_new, v_new


def linear(b: GraphBuilder, x: Value, part: str, width: int, biased: bool) -> Value:
    """``x`` times the weight ``part.weight`` with ``width`` rows, plus ``part.bias`` if ``biased``."""
    weight = b.weight(f"{part}.weight", (width, x.type.dims[-1]))
    return b.linear(x, weight, b.weight(f"{part}.bias", (width,)) if biased else None)


def _check_taps(config: ModelConfig, taps: tuple[int, ...]) -> None:
    increasing = all(a < b for a, b in pairwise(taps))
    if not increasing or any(not 0 <= tap <= config.layers for tap in taps):
        raise bad_config(f"taps={taps}", f"increasing numbers of layers from 0 to {config.layers}")


register_family("llama", build_llama, {"LlamaForCausalLM": Checkpoint(positions=2048)})
register_family("mistral", build_llama, {"MistralForCausalLM": Checkpoint(131_072, kv_heads=8, window=4096)})
register_family(
    "qwen2", build_llama, {"Qwen2ForCausalLM": Checkpoint(32_768, qkv_bias=True, window=4096, window_is_optional=True)}
)
register_family(
    "qwen3",
    build_llama,
    {"Qwen3ForCausalLM": Checkpoint(32_768, qk_norm=True, head_dim=128, window=4096, window_is_optional=True)},
)

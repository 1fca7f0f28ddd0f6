"""Models that can be priced but not served: OPT, by the shapes of its operators.

LayerNorm is priced as rms_norm, ReLU is left out and learned positions are a second embedding. Products, attention,
weights and caches, which take 99 percent of the time, are exact.
"""

from __future__ import annotations

from flexspec.builder import GraphBuilder, StepInputs
from flexspec.compiler.frontends.settings import Settings
from flexspec.graph import Graph, Value
from flexspec.models.config import ModelConfig
from flexspec.models.llama import linear
from flexspec.types import DType

OPT = "OPTForCausalLM"
OPT_NOTE = "priced only, not served: LayerNorm as rms_norm, ReLU left out"
_POSITION_OFFSET = 2  # OPT's position table has two more rows than the context


def opt_config(settings: Settings) -> ModelConfig:
    """The configuration in OPT's config.json. Raises ModelConfigError."""
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    if hidden % heads or settings.integer("word_embed_proj_dim", hidden) != hidden:
        expected = "word_embed_proj_dim equal to hidden_size, a multiple of the heads"
        raise settings.error("word_embed_proj_dim", expected, "use another size of OPT")
    return ModelConfig(
        family="opt",
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden,
        layers=settings.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=settings.integer("ffn_dim"),
        norm_eps=1e-5,
        max_positions=settings.integer("max_position_embeddings", 2048),
        tied_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def build_opt(config: ModelConfig, dtype: DType) -> Graph:
    """A step graph with the shapes of OPT."""
    b = GraphBuilder("opt", dtype)
    step = b.step_inputs()
    width = config.hidden_size
    table = b.weight("embed_tokens.weight", (config.vocab_size, width))
    positions = b.weight("embed_positions.weight", (config.max_positions + _POSITION_OFFSET, width))
    x = b.add(b.embedding(step.ids_T, table), b.embedding(step.positions_T, positions))
    caches: list[Value] = []
    for i in range(config.layers):
        with b.block(i):
            x, *new = _layer(b, step, config, x, f"layers.{i}")
        caches += new
    rows = b.rms_norm(
        b.select_rows(x, step.logit_rows_L), b.weight("final_layer_norm.weight", (width,)), config.norm_eps
    )
    return b.finish(b.linear(rows, table, name="logits_LV"), *caches)


def _layer(b: GraphBuilder, step: StepInputs, config: ModelConfig, x: Value, part: str) -> tuple[Value, Value, Value]:
    width = config.hidden_size
    h = b.rms_norm(x, b.weight(f"{part}.self_attn_layer_norm.weight", (width,)), config.norm_eps)
    q, k, v = (b.split_heads(linear(b, h, f"{part}.{n}_proj", width, True), config.heads) for n in "qkv")
    k_cache = b.kv_cache(f"{part}.k_cache", config.heads, config.head_dim)
    v_cache = b.kv_cache(f"{part}.v_cache", config.heads, config.head_dim)
    o, k_new, v_new = b.attention(q, k, v, k_cache, v_cache, step, config.head_dim**-0.5)
    x = b.add(x, linear(b, b.merge_heads(o), f"{part}.out_proj", width, True))
    h = b.rms_norm(x, b.weight(f"{part}.final_layer_norm.weight", (width,)), config.norm_eps)
    x = b.add(x, linear(b, linear(b, h, f"{part}.fc1", config.ffn_size, True), f"{part}.fc2", width, True))
    return x, k_new, v_new

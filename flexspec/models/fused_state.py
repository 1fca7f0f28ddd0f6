"""The hidden-state SSM (EAGLE family, arXiv 2401.15077, 2503.01840) and the fuse head it needs on the LLM.

The SSM reads the next token and a feature [T,E] of the row before it: at depth one the LLM's fused hidden states, below
that the SSM's own final state. Its LM head covers a reduced vocabulary; the drafter knows which ids those are.
"""

from __future__ import annotations

from flexspec.builder import GraphBuilder
from flexspec.errors import GraphError, ModelConfigError
from flexspec.graph import Graph, Value
from flexspec.models.config import Checkpoint, ModelConfig, check_config
from flexspec.models.llama import decoder_layer
from flexspec.models.registry import register_family
from flexspec.types import DType, Role


def build_fused_state(config: ModelConfig, dtype: DType, *, reduced_vocab_size: int, name: str = "ssm") -> Graph:
    """One step of the SSM: outputs ``logits_LV`` over the reduced vocabulary, ``tap0_TE`` [T,E], then the caches.

    ``tap0_TE`` (the final normed state of every row) is ``features_TE`` of the next depth. Raises ModelConfigError.
    """
    check_config(config)
    if not 0 < reduced_vocab_size <= config.vocab_size:
        raise ModelConfigError(
            f"reduced_vocab_size={reduced_vocab_size}", f"1 to vocab_size={config.vocab_size}", "correct config.json"
        )
    b = GraphBuilder(name, dtype)
    step = b.step_inputs()
    width = config.hidden_size
    features = b.input("features_TE", ("T", width))
    embedded = b.embedding(step.ids_T, b.weight("embed_tokens.weight", (config.vocab_size, width)))
    token = _normed_linear(b, config, embedded, "norm_embed.weight", "fc_embed.weight")
    state = _normed_linear(b, config, features, "norm_feature.weight", "fc_feature.weight")
    x = b.add(token, state)
    caches: list[Value] = []
    for i in range(config.layers):
        with b.block(i):
            x, *new = decoder_layer(b, step, config, x, f"layers.{i}")
        caches += new
    final = b.rms_norm(x, b.weight("norm.weight", (width,)), config.norm_eps, name="tap0_TE")
    rows = b.select_rows(final, step.logit_rows_L)
    logits = b.linear(rows, b.weight("lm_head.weight", (reduced_vocab_size, width)), name="logits_LV")
    return b.finish(logits, final, *caches)


def _normed_linear(b: GraphBuilder, config: ModelConfig, x_TE: Value, norm: str, weight: str) -> Value:
    width = config.hidden_size
    return b.linear(b.rms_norm(x_TE, b.weight(norm, (width,)), config.norm_eps), b.weight(weight, (width, width)))


def graft_fuse_head(graph: Graph) -> Graph:
    """The LLM graph, its taps replaced by one output: sum_i norm_i(tap_i) @ W_i^T, where the last tap has no norm.

    Weights: ``fuse.norms.{i}.weight`` [E] of all taps but the last, ``fuse.taps.{i}.weight`` [E,E]. Outputs:
    ``logits_LV``, ``features_TE``, then the caches. Raises GraphError if the graph has fewer than two taps.
    """
    types = graph.types()
    taps = [Value(name, types[name]) for name in graph.outputs[1:] if types[name].role is Role.ACTIVATION]
    if len(taps) < 2:
        raise GraphError(
            f"a graph with {len(taps)} taps", "at least two", "build the LLM with taps=(...) to get its hidden states"
        )
    final = graph.nodes[graph.producers()[taps[-1].name]]
    eps = final.attr("eps")
    assert isinstance(eps, float), "the last tap is the final norm"
    b = GraphBuilder.extend(graph, taps[0].type.dtype)
    total: Value | None = None
    for i, tap in enumerate(taps):
        last = i == len(taps) - 1
        width = tap.type.dims[-1]
        x = tap if last else b.rms_norm(tap, b.weight(f"fuse.norms.{i}.weight", (width,)), eps)
        part = b.linear(x, b.weight(f"fuse.taps.{i}.weight", (width, width)))
        total = part if total is None else b.add(total, part, name="features_TE" if last else "")
    assert total is not None
    caches = [Value(name, types[name]) for name in graph.outputs if types[name].role is Role.KV]
    return b.finish(Value(graph.outputs[0], types[graph.outputs[0]]), total, *caches)


register_family("fused_state", build_fused_state, {"FusedStateSSM": Checkpoint(positions=2048)})

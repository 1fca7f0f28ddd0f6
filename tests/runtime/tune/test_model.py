"""The training forward against the served graph, and the hand-written gradients against autograd's."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch

from flexspec.models.config import ModelConfig
from flexspec.models.fused_state import build_fused_state, graft_fuse_head
from flexspec.models.llama import build_llama
from flexspec.ops.rope import rope_tables
from flexspec.runtime.executors.step import StepBatch
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.runtime.tune.autograd import distil_loss, path_attention, rms_norm, rope, swiglu
from flexspec.runtime.tune.config import TrainConfig
from flexspec.runtime.tune.model import FusedStateNet, initial_weights, ssm_config, weight_shapes
from flexspec.types import DType, Role

LLM = ModelConfig("llama", 61, 32, 3, 4, 2, 8, 48, 1e-5, 128, tied_embeddings=True)
TAPS = (1, 2)
KEPT = 17


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: (rng.standard_normal(s) * 0.2 + (len(s) == 1)).astype(np.float32) for name, s in shapes.items()}


def _graph_weights(graph: object, seed: int) -> dict[str, np.ndarray]:
    return _random({v.name: v.type.dims for v in graph.inputs_of(Role.WEIGHT)}, seed)


def _step(ids: list[int], positions: list[int], context: int, ancestors: np.ndarray | None = None, **extra: object):
    n = len(ids)
    return StepBatch(
        ids_T=np.array(ids, np.int32),
        positions_T=np.array(positions, np.int32),
        starts_R1=np.array([0, n], np.int32),
        contexts_R=np.array([context], np.int32),
        causal_R=np.array([ancestors is None], np.uint8),
        page_table_RB=np.arange(4, dtype=np.int32)[None],
        ancestors_TW=np.zeros((n, 1), np.uint64) if ancestors is None else ancestors,
        logit_rows_L=np.arange(n, dtype=np.int32),
        **extra,
    )


def _net() -> FusedStateNet:
    cos, sin = rope_tables({**asdict(LLM.rope)}, LLM.head_dim, LLM.max_positions)
    return FusedStateNet(ssm_config(LLM), len(TAPS) + 1, (torch.from_numpy(cos), torch.from_numpy(sin)))


def test_unroll_equals_the_graphs_over_three_depths() -> None:
    ids = np.random.default_rng(1).integers(0, LLM.vocab_size, 45).tolist()
    tapped = build_llama(LLM, DType.F32, taps=TAPS)
    llm_weights = _graph_weights(tapped, 2)
    ssm_weights = _random(weight_shapes(ssm_config(LLM), len(TAPS) + 1), 3)
    executor = ReferenceExecutor(tapped, llm_weights, 4, 64)
    states = executor.step(_step(ids, list(range(len(ids))), 0), want_logits=True).features_TE
    fuse_head = {name: x for name, x in ssm_weights.items() if name.startswith("fuse.")}
    fused_llm = ReferenceExecutor(graft_fuse_head(tapped), {**llm_weights, **fuse_head}, 4, 64)
    features = fused_llm.step(_step(ids, list(range(len(ids))), 0), want_logits=True).features_TE

    w = {name: torch.from_numpy(x) for name, x in ssm_weights.items()}
    taps = torch.from_numpy(states).view(1, len(ids), len(TAPS) + 1, LLM.hidden_size)
    np.testing.assert_allclose(_net().fuse(w, taps)[0].numpy(), features, atol=1e-4)

    embedding = llm_weights["embed_tokens.weight"]
    outs = _net().unroll(w, torch.from_numpy(embedding[ids[1:]])[None], taps[:, :-1], 3)
    graph = build_fused_state(ssm_config(LLM), DType.F32, reduced_vocab_size=KEPT)
    shared = {"embed_tokens.weight": embedding, "lm_head.weight": embedding[:KEPT]}
    for root in (0, 1, 31, 32, len(ids) - 4):
        ssm = ReferenceExecutor(graph, {**shared, **ssm_weights}, 4, 64)
        committed = _step(ids[1 : root + 2], list(range(root + 1)), 0, features_TE=features[: root + 1])
        result = ssm.step(committed, want_logits=True)
        state = result.features_TE[-1:]
        np.testing.assert_allclose(outs[0][0, root].numpy(), state[0], atol=1e-4)
        np.testing.assert_allclose(embedding[:KEPT] @ outs[0][0, root].numpy(), result.logits_LV[-1], atol=1e-3)
        for depth in (1, 2):
            drafted = _step([ids[root + depth + 1]], [root + depth], root + depth, features_TE=state)
            state = ssm.step(drafted, want_logits=True).features_TE
            np.testing.assert_allclose(outs[depth][0, root].numpy(), state[0], atol=1e-4)


def _plain_attention(q, mask, scale, keys, values):
    tails = [(q * k[:, None]).sum(-1, True) * scale for k in keys[1:]]
    law = torch.cat([q @ keys[0][:, None].mT * scale + mask, *tails], -1).softmax(-1)
    rows = q.shape[2]
    tails = [law[..., rows + i : rows + i + 1] * v[:, None] for i, v in enumerate(values[1:])]
    return law[..., :rows] @ values[0][:, None] + sum(tails)


def _plain_loss(state, law, target, head, shift, ce):
    log_q = torch.log_softmax(state @ head.T + shift, -1)
    token = log_q.gather(1, target.clamp(min=0)[:, None])[:, 0] * (target >= 0)
    return -((law * log_q).sum(-1) + ce * token).mean()


def _check(ours, plain, tensors, fixed=()) -> None:
    """Values and gradients of two functions of ``tensors`` agree."""
    grads = []
    for function in (ours, plain):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = function(*leaves, *fixed)
        weight = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
        (out * weight).sum().backward()
        grads.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_path_attention_gradients(extra: int) -> None:
    torch.manual_seed(extra)
    q = torch.randn(4, 3, 7, 8)
    kv = [torch.randn(4, 7, 8) for _ in range(2 * (1 + extra))]
    mask = torch.full((7, 7), -3e4).triu_(1)
    half = 1 + extra
    _check(
        lambda q, *kv: path_attention(q, mask, 0.3, list(kv[:half]), list(kv[half:])),
        lambda q, *kv: _plain_attention(q, mask, 0.3, kv[:half], kv[half:]),
        [q, *kv],
    )


def test_row_wise_gradients() -> None:
    torch.manual_seed(0)
    x, y, weight = torch.randn(3, 5, 8), torch.randn(3, 5, 8), torch.randn(8)
    plain_norm = lambda x, w: x * (x.square().mean(-1, True) + 1e-5).rsqrt() * w  # noqa: E731
    _check(lambda x, w: rms_norm(x, w, 1e-5), plain_norm, [x, weight])
    _check(swiglu, lambda g, u: torch.nn.functional.silu(g) * u, [x, y])
    angle = torch.randn(5, 4)

    def plain_rope(x):
        z = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    _check(lambda x: rope(x, angle.cos(), angle.sin()), plain_rope, [x])


def test_loss_gradient_and_ignored_targets() -> None:
    torch.manual_seed(0)
    head, shift = torch.randn(11, 8), torch.randn(11)
    law = torch.softmax(torch.randn(300, 11), -1)
    target = torch.randint(-1, 11, (300,))
    fixed = (law, target, head, shift, 0.3)
    _check(distil_loss, _plain_loss, [torch.randn(300, 8)], fixed)


class _Source:
    """A WeightSource of one value per tensor."""

    def names(self) -> list[str]:
        return [name.replace("layers.0.", "layers.2.") for name in weight_shapes(ssm_config(LLM), 3)]

    def shape(self, name: str) -> tuple[int, ...]:
        return weight_shapes(ssm_config(LLM), 3)[name.replace("layers.2.", "layers.0.")]

    def get(self, name: str) -> np.ndarray:
        return np.full(self.shape(name), 2.0, np.float32)


def test_the_start_is_the_llm_s_last_layer_scaled_down() -> None:
    config = TrainConfig(branch_scale=0.25, norm_scale=0.5, seed=3)
    start = initial_weights(ssm_config(LLM), 3, _Source(), LLM.layers, config)
    assert {name: tuple(w.shape) for name, w in start.items()} == weight_shapes(ssm_config(LLM), 3)
    assert start["layers.0.self_attn.q_proj.weight"].unique().tolist() == [2.0]
    assert start["layers.0.mlp.down_proj.weight"].unique().tolist() == [0.5]
    assert start["layers.0.self_attn.o_proj.weight"].unique().tolist() == [0.5]
    assert start["norm.weight"].unique().tolist() == [1.0]
    assert (start["fuse.taps.2.weight"] - torch.eye(LLM.hidden_size)).abs().max() < 0.1
    again = initial_weights(ssm_config(LLM), 3, _Source(), LLM.layers, config)
    assert all(torch.equal(start[name], again[name]) for name in start)

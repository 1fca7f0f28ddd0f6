"""Operator references against independent formulas in float64. Legend: T rows, H heads, D head dim."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flexspec.ops.record import record_of
from flexspec.ops.rope import rope_tables

ROPE = {
    "theta": 1e4, "kind": "default", "factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_positions": 0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 0.0, "max_positions": 64,
}  # fmt: skip


def run(op: str, *inputs: torch.Tensor, **attrs: object) -> tuple[torch.Tensor, ...]:
    return record_of(op).reference(inputs, attrs)  # type: ignore[arg-type]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_has_unit_mean_square() -> None:
    (y,) = run("rms_norm", 100 * randn(5, 64), torch.ones(64), eps=1e-9)
    torch.testing.assert_close(y.pow(2).mean(-1), torch.ones(5))


def test_rope_is_a_complex_rotation() -> None:
    x, positions = randn(5, 2, 8), torch.tensor([0, 1, 7, 7, 63], dtype=torch.int32)
    (y,) = run("rope", x, positions, **ROPE)
    angles = positions.double()[:, None] * 1e4 ** (-torch.arange(4).double() / 4)
    wanted = torch.complex(x[..., :4].double(), x[..., 4:].double()) * torch.exp(1j * angles)[:, None]
    torch.testing.assert_close(y.double(), torch.cat([wanted.real, wanted.imag], -1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rope_tables_are_what_the_reference_applies(kind: str) -> None:
    attrs = ROPE | {"kind": kind, "factor": 4.0, "original_max_positions": 16}
    cos, sin = rope_tables(attrs, 8, 64)
    assert cos.dtype == sin.dtype == np.float32 and cos.shape == sin.shape == (64, 4)
    unit = torch.cat([torch.ones(64, 1, 4), torch.zeros(64, 1, 4)], -1)
    (y,) = run("rope", unit, torch.arange(64, dtype=torch.int32), **attrs)
    np.testing.assert_allclose(y[:, 0].numpy(), np.concatenate([cos, sin], -1), rtol=0, atol=2e-6)


def test_yarn_attention_factor_derived_or_given() -> None:
    attrs = ROPE | {"kind": "yarn", "factor": 4.0, "original_max_positions": 16}
    assert rope_tables(attrs, 8, 1)[0][0, 0] == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert rope_tables(attrs | {"attention_factor": 1.5}, 8, 1)[0][0, 0] == 1.5


def test_attention_of_two_requests_against_dense_float64() -> None:
    """Request 0: a tree behind 40 committed tokens, across a page edge; request 1: a causal chain with no context."""
    t_rows, heads, groups, d = 7, 4, 2, 8
    q, k, v = randn(t_rows, heads, d), randn(t_rows, groups, d, seed=1), randn(t_rows, groups, d, seed=2)
    k_cache, v_cache = randn(4, 32, groups, d, seed=3), randn(4, 32, groups, d, seed=4)
    parents = [-1, 0, 0, 2]
    bits = [1, 1 | 2, 1 | 4, 1 | 4 | 8]
    ancestors = torch.tensor([[b] for b in bits] + [[0]] * 3, dtype=torch.int64).view(torch.uint64)
    pages = torch.tensor([[2, 0], [3, 3]], dtype=torch.int32)
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 7], [40, 0], [0, 1])]
    o, k_new, v_new = run("attention", q, k, v, k_cache, v_cache, *ints, pages, ancestors, scale=0.3)
    history_k = torch.cat([k_cache[2], k_cache[0][:8]]).double()
    history_v = torch.cat([v_cache[2], v_cache[0][:8]]).double()
    for i in range(t_rows):
        rows, node = [], i
        while i < 4 and node >= 0:
            rows.append(node)
            node = parents[node]
        rows = rows if i < 4 else list(range(4, i + 1))
        keys = torch.cat([history_k, k[rows].double()]) if i < 4 else k[rows].double()
        values = torch.cat([history_v, v[rows].double()]) if i < 4 else v[rows].double()
        for h in range(heads):
            weights = (keys[:, h // 2] @ q[i, h].double() * 0.3).softmax(0)
            torch.testing.assert_close(o[i, h].double(), weights @ values[:, h // 2], rtol=1e-5, atol=1e-6)
    assert torch.equal(k_new[0, 8:12], k[:4]) and torch.equal(v_new[3, :3], v[4:])
    untouched = torch.ones(4, 32, dtype=torch.bool)
    untouched[0, 8:12] = untouched[3, :3] = False
    assert torch.equal(k_new[untouched], k_cache[untouched])


def test_ancestor_words_beyond_the_first() -> None:
    """Row 70 of a star sees only the root and itself: its own bit is in word 1."""
    n = 71
    q, k = torch.zeros(n, 1, 2), torch.zeros(n, 1, 2)
    v = torch.arange(n).float()[:, None, None].expand(n, 1, 2).contiguous()
    words = np.zeros((n, 2), np.uint64)
    words[:, 0] = 1
    for i in range(n):
        words[i, i // 64] |= np.uint64(1 << (i % 64))
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, n], [0], [0], [[0, 1, 2]])]
    cache = torch.zeros(3, 32, 1, 2)
    o, _, _ = run("attention", q, k, v, cache, cache, *ints, torch.from_numpy(words), scale=1.0)
    torch.testing.assert_close(o[:, 0, 0], torch.arange(n).float() / 2)


def test_fused_forms_equal_what_they_replace() -> None:
    x, w1, w2, b1, b2 = randn(5, 8), randn(6, 8, seed=1), randn(6, 8, seed=2), randn(6, seed=3), randn(6, seed=4)
    y1, y2 = run("linear", x, w1)[0], run("linear", x, w2)[0]
    assert torch.equal(run("linear_swiglu", x, w1, w2)[0], run("swiglu", y1, y2)[0])
    biased = run("linear_group", x, w1, w2, b1, b2, count=2, biased=True)
    assert torch.equal(biased[1], run("linear", x, w2, b2)[0])
    assert torch.equal(run("linear_add", x, w1, y2, b1)[0], run("add", y2, run("linear", x, w1, b1)[0])[0])


@pytest.mark.parametrize("op", ["add", "swiglu", "linear", "rms_norm"])
def test_bf16_in_gives_bf16_near_the_float32_result(op: str) -> None:
    operands = [randn(8, 8), randn(8, 8, seed=1)] if op != "rms_norm" else [randn(8, 8), randn(8, seed=1)]
    attrs = {"eps": 1e-5} if op == "rms_norm" else {}
    halves = [x.bfloat16() for x in operands]
    (found,) = run(op, *halves, **attrs)
    (wanted,) = run(op, *(x.float() for x in halves), **attrs)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.02)


def test_float64_operands_stay_float64() -> None:
    (y,) = run("rms_norm", randn(2, 8).double(), torch.ones(8).double(), eps=1e-5)
    assert y.dtype is torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("experts", "width"), [(3, 7), (17, 84), (64, 129)])
def test_router_takes_the_first_of_equal_experts(experts: int, width: int, dtype: torch.dtype) -> None:
    """Equal rows have equal scores, wherever they stand among others and whatever the machine's matrix product does."""
    x, weight = randn(9, width).to(dtype), randn(1, width, seed=1).to(dtype).expand(experts, width).contiguous()
    (routing,) = run("router", x, weight, top_k=2, softmax="all", normalize=True)
    assert (routing[:, :2] == 0.5).all() and (routing[:, 2:] == 0).all()


@pytest.mark.parametrize("softmax", ["all", "chosen"])
@pytest.mark.parametrize("normalize", [True, False])
def test_router_weighs_the_best_experts(softmax: str, normalize: bool) -> None:
    """By hand, row by row; the second of two equal experts is not chosen where only one has room."""
    x, weight = randn(7, 16).double(), randn(5, 16, seed=1).double()
    weight[4] = weight[1]
    (routing,) = run("router", x, weight, top_k=2, softmax=softmax, normalize=normalize)
    scores = x @ weight.T
    for row in range(7):
        order = sorted(range(5), key=lambda expert: (-scores[row, expert].item(), expert))[:2]
        among = order if softmax == "chosen" else range(5)
        total = sum(math.exp(scores[row, expert]) for expert in among)
        chances = [math.exp(scores[row, expert]) / total for expert in order]
        if normalize:
            chances = [chance / sum(chances) for chance in chances]
        assert routing[row].nonzero().flatten().tolist() == sorted(order)
        np.testing.assert_allclose(routing[row, order], chances, rtol=1e-6)


def test_experts_are_weighed_and_summed() -> None:
    shapes = (9, 6), (4, 5, 6), (4, 5, 6), (4, 6, 5)
    x, gate, up, down = (randn(*shape, seed=i).double() for i, shape in enumerate(shapes))
    routing = torch.rand(9, 4, generator=torch.Generator().manual_seed(3)).double()
    routing[:, 2] = 0.0  # nobody's
    routing[3] = 0.0  # a row none of whose experts are here
    routing[5, 1] = 0.0
    (y,) = run("moe_experts", x, routing, gate, up, down, top_k=2, experts=4)
    h = torch.nn.functional.silu(torch.einsum("te,xfe->txf", x, gate)) * torch.einsum("te,xfe->txf", x, up)
    np.testing.assert_allclose(y, torch.einsum("tx,txf,xef->te", routing, h, down), atol=1e-12)
    assert not y[3].any()

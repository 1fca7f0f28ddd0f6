"""The fused-state SSM as torch training code: weights by canonical name, fuse head, and the depth-unrolled forward.

The graph form served at run time is flexspec/models/fused_state.py; tests hold the two equal. Weights are a plain
dict so that one float32 master set can be cast once per step to the compute dtype.

Shape letters: B sequences, T rows of a sequence, J taps, H heads, G kv heads, D head dim, E hidden, F ffn.

Row t of a sequence x_0 x_1 ... holds token x_{t+1} and the LLM's fused state at t (the state that predicted x_{t+1}).
Depth 0 rows read LLM states only. The row of root r at depth j holds token x_{r+j+1} and the SSM's own output at
(r, depth j-1); it attends to the depth-0 rows 0..r and to its path, the rows of root r at depths 1..j. This is what a
draft sees: everything committed before the root, then its own drafts (EAGLE-3's training-time test, arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flexspec.models.config import ModelConfig, WeightSource
from flexspec.runtime.tune.autograd import path_attention, rms_norm, rope, swiglu
from flexspec.runtime.tune.config import TrainConfig

Weights = dict[str, Tensor]
LAYER = "layers.0."
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
_NORMS = ("input_layernorm", "post_attention_layernorm")


def ssm_config(llm: ModelConfig) -> ModelConfig:
    """The SSM's configuration: one layer with the LLM's own widths, family ``fused_state``."""
    return replace(
        llm, family="fused_state", layers=1, tied_embeddings=False,
        qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False,
        experts=0, experts_per_token=0, expert_ffn_size=0, dense_layers=(),
    )  # fmt: skip


def weight_shapes(config: ModelConfig, taps: int) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every trained weight; ``taps`` counts the fused LLM states, including the last."""
    e, f = config.hidden_size, config.ffn_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    dims = dict(zip(_PROJECTIONS, ((q, e), (kv, e), (kv, e), (e, q), (f, e), (f, e), (e, f)), strict=True))
    shapes: dict[str, tuple[int, ...]] = {"fc_embed.weight": (e, e), "fc_feature.weight": (e, e)}
    shapes |= {f"{name}.weight": (e,) for name in ("norm_embed", "norm_feature", "norm")}
    shapes |= {f"{LAYER}{name}.weight": shape for name, shape in dims.items()}
    shapes |= {f"{LAYER}{name}.weight": (e,) for name in _NORMS}
    shapes |= {f"fuse.norms.{i}.weight": (e,) for i in range(taps - 1)}
    shapes |= {f"fuse.taps.{i}.weight": (e, e) for i in range(taps)}
    return shapes


def initial_weights(config: ModelConfig, taps: int, llm: WeightSource, llm_layers: int, train: TrainConfig) -> Weights:
    """Float32 start: the LLM's last layer and final norm, near-identity fusions, small seeded noise.

    The layer's outputs are scaled down, since they are made for a residual stream many times wider than this input, and
    so is the final norm: a start that is sure of wrong tokens (KL 35 for SmolLM2) spends its first steps on unlearning.
    Biases and q/k norms of the LLM's layer are left out: the SSM has none. If that layer is a mixture of experts the
    SSM's one MLP starts as noise: no expert alone, nor their mean, computes what the layer does.

    Raises what ``llm.get`` raises.
    """
    generator = torch.Generator().manual_seed(train.seed)
    e = config.hidden_size

    def noise() -> Tensor:
        return torch.randn(e, e, generator=generator) * 0.01

    weights = {name: torch.ones(shape) for name, shape in weight_shapes(config, taps).items()}
    known = set(llm.names())
    for name in (*_PROJECTIONS, *_NORMS):
        stored, ours = f"layers.{llm_layers - 1}.{name}.weight", f"{LAYER}{name}.weight"
        if stored not in known and name.startswith("mlp."):
            weights[ours] = torch.randn(weights[ours].shape, generator=generator) * e**-0.5
        else:
            weights[ours] = torch.from_numpy(llm.get(stored).copy())
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"{LAYER}{name}.weight"] *= train.branch_scale
    weights["norm.weight"] = torch.from_numpy(llm.get("norm.weight").copy()) * train.norm_scale
    weights["fc_embed.weight"] = torch.eye(e) * 0.5 + noise()
    weights["fc_feature.weight"] = torch.eye(e) + noise()
    for i in range(taps):
        weights[f"fuse.taps.{i}.weight"] = noise() + (torch.eye(e) if i == taps - 1 else 0)
    return {name: weights[name].contiguous() for name in sorted(weights)}


class FusedStateNet:
    """The forward pass of one configuration over cast weights; holds the rotary tables and no trained weights."""

    def __init__(self, config: ModelConfig, taps: int, cos_sin: tuple[Tensor, Tensor]) -> None:
        self.config = config
        self.taps = taps
        self.cos, self.sin = cos_sin  # float32 [max positions, D / 2]

    def fuse(self, w: Mapping[str, Tensor], taps_BTJE: Tensor) -> Tensor:
        """The feature of each position: the sum of a linear of each LLM state; all but the last state are normed."""
        last = self.taps - 1
        feature = taps_BTJE[..., last, :] @ w[f"fuse.taps.{last}.weight"].T
        for i in range(last):
            normed = rms_norm(taps_BTJE[..., i, :], w[f"fuse.norms.{i}.weight"], self.config.norm_eps)
            feature = feature + normed @ w[f"fuse.taps.{i}.weight"].T
        return feature

    def unroll(self, w: Mapping[str, Tensor], embeds_BTE: Tensor, taps_BTJE: Tensor, depths: int) -> list[Tensor]:
        """Normed output states of depths 0..depths-1; entry j is [B, T-j, E], row r for root r.

        ``embeds_BTE[:, t]`` embeds token x_{t+1}, ``taps_BTJE[:, t]`` are the LLM's states at t. Entry j's row r
        predicts x_{r+j+2}. ``depths`` must not exceed T.
        """
        rows = embeds_BTE.shape[1]
        embedded = self._embed(w, embeds_BTE)
        feature = self.fuse(w, taps_BTJE)
        mask = torch.full((rows, rows), -3e4).triu_(1).to(embeds_BTE.dtype)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outs: list[Tensor] = []
        for j in range(depths):
            n = rows - j
            x = embedded[:, j:] + self._feature(w, feature[:, :n])
            keys, values = [k[:, :n] for k in keys], [v[:, :n] for v in values]
            x = self._layer(w, x, j, mask[:n, :n], keys, values)
            feature = rms_norm(x, w["norm.weight"], self.config.norm_eps)
            outs.append(feature)
        return outs

    def _embed(self, w: Mapping[str, Tensor], embeds: Tensor) -> Tensor:
        return rms_norm(embeds, w["norm_embed.weight"], self.config.norm_eps) @ w["fc_embed.weight"].T

    def _feature(self, w: Mapping[str, Tensor], feature: Tensor) -> Tensor:
        return rms_norm(feature, w["norm_feature.weight"], self.config.norm_eps) @ w["fc_feature.weight"].T

    def _layer(
        self, w: Mapping[str, Tensor], x: Tensor, depth: int, mask: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """One Llama layer over rows at positions depth, depth+1, ...; appends its keys and values to the lists."""
        c, batch, n = self.config, x.shape[0], x.shape[1]
        tables = (self.cos[depth : depth + n].to(x.dtype), self.sin[depth : depth + n].to(x.dtype))
        h = rms_norm(x, w[LAYER + "input_layernorm.weight"], c.norm_eps)
        q = self._heads(h @ w[LAYER + "self_attn.q_proj.weight"].T, c.heads // c.kv_heads)
        k = self._heads(h @ w[LAYER + "self_attn.k_proj.weight"].T, 1)
        keys.append(rope(k, *tables)[:, 0])
        values.append(self._heads(h @ w[LAYER + "self_attn.v_proj.weight"].T, 1)[:, 0])
        out = path_attention(rope(q, *tables), mask, c.head_dim**-0.5, keys, values)
        out = out.view(batch, c.heads, n, c.head_dim).transpose(1, 2).reshape(batch, n, -1)
        x = x + out @ w[LAYER + "self_attn.o_proj.weight"].T
        h = rms_norm(x, w[LAYER + "post_attention_layernorm.weight"], c.norm_eps)
        gate, up = h @ w[LAYER + "mlp.gate_proj.weight"].T, h @ w[LAYER + "mlp.up_proj.weight"].T
        return x + swiglu(gate, up) @ w[LAYER + "mlp.down_proj.weight"].T

    def _heads(self, x: Tensor, group: int) -> Tensor:
        """[B, T, G*group*D] -> contiguous [B*G, group, T, D]."""
        batch, n, _ = x.shape
        heads = x.view(batch, n, self.config.kv_heads, group, self.config.head_dim).permute(0, 2, 3, 1, 4)
        return heads.reshape(batch * self.config.kv_heads, group, n, self.config.head_dim)

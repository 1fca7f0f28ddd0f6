"""One Llama decoder block written in several ways, as different people would write it, for the torch-mlir frontend."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, EPS, THETA, POSITIONS = 64, 96, 4, 2, 16, 1e-5, 10000.0, 256


def project(width_in: int, width_out: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(width_in, width_out, bias=bias)


class PowNorm(nn.Module):
    """Statistics in float32, the weight first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + EPS)
        return self.weight * wide.to(x.dtype)


class SqrtNorm(nn.Module):
    """x / sqrt(mean(x * x) + eps), the weight last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(EPS + (x * x).mean(dim=-1, keepdim=True)) * self.weight


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class RepeatAttention(nn.Module):
    """Frequencies in a buffer, rotate_half, kv heads repeated by expand. Optional biases and q/k norm (Qwen)."""

    def __init__(self, bias: bool = False, qk_norm: bool = False) -> None:
        super().__init__()
        self.q_proj = project(HIDDEN, HEADS * HEAD_DIM, bias)
        self.k_proj = project(HIDDEN, KV_HEADS * HEAD_DIM, bias)
        self.v_proj = project(HIDDEN, KV_HEADS * HEAD_DIM, bias)
        self.o_proj = project(HEADS * HEAD_DIM, HIDDEN)
        self.q_norm = PowNorm(HEAD_DIM) if qk_norm else nn.Identity()
        self.k_norm = PowNorm(HEAD_DIM) if qk_norm else nn.Identity()
        self.register_buffer("inv_freq", 1.0 / (THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, rows, -1, HEAD_DIM)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, rows, -1, HEAD_DIM)).transpose(1, 2)
        v = self.v_proj(x).view(batch, rows, -1, HEAD_DIM).transpose(1, 2)
        angles = (self.inv_freq[None, :, None].float() @ positions[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype).unsqueeze(1), angles.sin().to(x.dtype).unsqueeze(1)
        q, k = (each * cos + rotate_half(each) * sin for each in (q, k))
        k, v = (self.repeat(each) for each in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, rows, -1))

    def repeat(self, x: torch.Tensor) -> torch.Tensor:
        batch, heads, rows, width = x.shape
        share = HEADS // heads
        return x[:, :, None].expand(batch, heads, share, rows, width).reshape(batch, heads * share, rows, width)


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = project(HIDDEN, FFN), project(HIDDEN, FFN)
        self.down_proj = project(FFN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class HuggingFaceStyle(nn.Module):
    """[1,T,E] and positions, modules named as in checkpoints."""

    def __init__(self, bias: bool = False, qk_norm: bool = False) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = PowNorm(HIDDEN), PowNorm(HIDDEN)
        self.self_attn, self.mlp = RepeatAttention(bias, qk_norm), GatedMlp()

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class PackedStyle(nn.Module):
    """[T,E] without a batch, cos and sin passed, halves by chunk, grouped attention, bare parameters, swapped sums."""

    RENAME = {
        "wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj",
        "w1": "mlp.gate_proj", "w3": "mlp.up_proj", "w2": "mlp.down_proj",
        "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.ffn_norm, self.attention_norm = nn.RMSNorm(HIDDEN, eps=EPS), nn.RMSNorm(HIDDEN, eps=EPS)
        self.w1, self.w2, self.w3 = project(HIDDEN, FFN), project(FFN, HIDDEN), project(HIDDEN, FFN)
        self.wv, self.wk = project(HIDDEN, KV_HEADS * HEAD_DIM), project(HIDDEN, KV_HEADS * HEAD_DIM)
        self.wo, self.wq = project(HEADS * HEAD_DIM, HIDDEN), project(HIDDEN, HEADS * HEAD_DIM)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        v = self.wv(h).unflatten(-1, (KV_HEADS, HEAD_DIM))
        k = self.rotate((h @ self.wk.weight.T).unflatten(-1, (KV_HEADS, HEAD_DIM)), cos, sin)
        q = self.rotate(self.wq(self.attention_norm(x)).unflatten(-1, (HEADS, HEAD_DIM)), cos, sin)
        q, k, v = (each.permute(1, 0, 2).unsqueeze(0) for each in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=HEAD_DIM**-0.5, enable_gqa=True)
        x = self.wo(out.squeeze(0).permute(1, 0, 2).flatten(1)) + x
        h = self.ffn_norm(x)
        gate = self.w1(h)
        return self.w2(self.w3(h) * (torch.sigmoid(gate) * gate)) + x

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        lo, hi = x.chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([lo * cos - hi * sin, lo * sin + hi * cos], -1)


class TableStyle(nn.Module):
    """Whole cos and sin tables in buffers, cut to T rows; positions are implied; kv heads by repeat_interleave."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = SqrtNorm(HIDDEN), SqrtNorm(HIDDEN)
        self.self_attn = nn.ModuleDict({f"{name}_proj": project(HIDDEN, heads * HEAD_DIM) for name, heads in
                                        (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS), ("o", HEADS))})  # fmt: skip
        self.mlp = GatedMlp()
        inverse = THETA ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
        angles = torch.outer(torch.arange(POSITIONS, dtype=torch.float32), inverse).repeat(1, 2)
        self.register_buffer("cos_table", angles.cos(), persistent=False)
        self.register_buffer("sin_table", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add_mlp(x + self.attend(self.input_layernorm(x)))

    def add_mlp(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))

    def attend(self, h: torch.Tensor) -> torch.Tensor:
        rows = h.shape[1]
        cos, sin = self.cos_table[:rows], self.sin_table[:rows]
        q, k, v = (self.self_attn[f"{name}_proj"](h).view(1, rows, -1, HEAD_DIM).transpose(1, 2) for name in "qkv")
        q, k = ((rotate_half(each) * sin) + (cos * each) for each in (q, k))
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.self_attn["o_proj"](out.transpose(1, 2).contiguous().view(1, rows, HEADS * HEAD_DIM))


class InnerFrequencies(HuggingFaceStyle):
    """Frequencies computed in forward from arange, positions by arange(T), angles by outer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        inverse = 1.0 / (THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
        angles = torch.outer(torch.arange(x.shape[1]).float(), inverse)
        part = self.self_attn
        h = self.input_layernorm(x)
        split = x.shape[:-1]
        q, k, v = (f(h).view(*split, -1, HEAD_DIM) for f in (part.q_proj, part.k_proj, part.v_proj))
        q, k = (PackedStyle.rotate(each[0], angles.cos(), angles.sin()).unsqueeze(0) for each in (q, k))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + part.o_proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))

"""Hand-written forward/backward pairs for training on a CPU: RMS norm, rotary embedding, path attention, SwiGLU, loss.

Each saves only what its backward needs and works in the dtype of its input (bfloat16 in training, float32 in tests);
composed from eager operators the same mathematics reads and writes two to four times as much memory.

Shape letters: B sequences, T rows of a sequence, H heads, G kv heads, D head dim, E hidden, N, U loss rows and columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_LOSS_ROWS = 256  # rows of logits alive at once: [256, 4k] float32 stays in the L2 cache


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        inverse = square.mul_(1 / x.shape[-1]).add_(eps).rsqrt_().to(x.dtype)
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        out: Tensor = normed * weight
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, inverse, weight = ctx.saved_tensors
        grad = grads[0]
        grad_weight = (grad * normed).flatten(0, -2).sum(0, dtype=torch.float32).to(weight.dtype)
        scaled = grad * weight
        mean = (scaled * normed).sum(-1, keepdim=True).mul_(1 / grad.shape[-1])
        return scaled.addcmul_(normed, mean, value=-1).mul_(inverse), grad_weight, None


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_up = grads[0] * silu
        # d silu = sigmoid + silu * (1 - sigmoid)
        slope = silu.neg_().addcmul_(gate, torch.ones((), dtype=gate.dtype)).mul_(sigmoid).add_(sigmoid)
        return slope.mul_(up).mul_(grads[0]), grad_up


class _PathAttention(Function):
    """Causal attention over the first keys plus one key of its own path per later depth (see model.py)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, mask: Tensor, scale: float, *keys_values: Tensor) -> Tensor:
        half = len(keys_values) // 2
        (k0, *keys), (v0, *values) = keys_values[:half], keys_values[half:]
        bgs, group, rows, dim = q.shape  # [B*G, H/G, T, D]
        q = q * scale
        flat = q.view(bgs, group * rows, dim)
        scores = torch.bmm(flat, k0.mT).view(bgs, group, rows, rows).add_(mask)
        extra = [(q * k[:, None]).sum(-1, keepdim=True) for k in keys]
        weights = torch.softmax(torch.cat([scores, *extra], -1) if extra else scores, -1)
        base = weights[..., :rows].contiguous() if extra else weights
        out = torch.bmm(base.view(bgs, group * rows, rows), v0).view(q.shape)
        tails = [weights[..., rows + i : rows + i + 1].contiguous() for i in range(len(values))]
        for tail, v in zip(tails, values, strict=True):
            out.addcmul_(tail, v[:, None])
        ctx.scale = scale
        ctx.save_for_backward(q, out, base, k0, v0, *tails, *keys, *values)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, out, base, k0, v0, *rest = ctx.saved_tensors
        n = len(rest) // 3
        tails, keys, values = rest[:n], rest[n : 2 * n], rest[2 * n :]
        bgs, group, rows, dim = q.shape
        grad = grads[0].contiguous()
        flat_grad, flat_base = grad.view(bgs, group * rows, dim), base.view(bgs, group * rows, rows)
        dot = (grad * out).sum(-1, keepdim=True)  # softmax's backward needs sum_j p_j dp_j = grad . out
        grad_scores = torch.bmm(flat_grad, v0.mT).view(base.shape).sub_(dot).mul_(base)
        flat_scores = grad_scores.view(bgs, group * rows, rows)
        grad_q = torch.bmm(flat_scores, k0).view(q.shape)
        grad_k = [torch.bmm(flat_scores.mT, q.view(bgs, group * rows, dim))]
        grad_v = [torch.bmm(flat_base.mT, flat_grad)]
        for tail, k, v in zip(tails, keys, values, strict=True):
            grad_tail = ((grad * v[:, None]).sum(-1, keepdim=True) - dot) * tail
            grad_q.addcmul_(grad_tail, k[:, None])
            grad_k.append((grad_tail * q).sum(1))
            grad_v.append((tail * grad).sum(1))
        return grad_q.mul_(ctx.scale), None, None, *grad_k, *grad_v


class _DistilLoss(Function):
    """KL(teacher || student) + ce_weight * CE(token) with a frozen head; the forward pass computes the gradient."""

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, teacher: Tensor, target: Tensor, head: Tensor, shift: Tensor, ce_weight: float
    ) -> Tensor:
        n = len(state)
        detached, teacher = pad_rows(state.detach(), _LOSS_ROWS), pad_rows(teacher, _LOSS_ROWS)
        target = pad_rows(target + 1, _LOSS_ROWS) - 1
        grad = torch.empty_like(detached)
        total = 0.0
        for i in range(0, n, _LOSS_ROWS):
            rows = slice(i, i + _LOSS_ROWS)
            logits = (detached[rows] @ head.T).float().add_(shift)
            law = teacher[rows].float()
            log_q = torch.log_softmax(logits, -1)
            known = (target[rows] >= 0).float()[:, None]
            column = target[rows].clamp(min=0)[:, None]
            token_log = log_q.gather(1, column) * known
            total -= (law * log_q).sum().item() + ce_weight * token_log.sum().item()
            slope = log_q.exp_().mul_(1 + ce_weight * known).sub_(law)
            slope.scatter_add_(1, column, -ce_weight * known)
            grad[rows] = slope.to(grad.dtype) @ head
        ctx.save_for_backward(grad[:n])
        ctx.rows = n
        return torch.tensor(total / n)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * (grads[0] / ctx.rows).to(grad.dtype), None, None, None, None, None


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """``x`` with rows of zeros up to a multiple, so that matrix products have few shapes."""
    missing = -len(x) % multiple
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim with float32 statistics; ``weight`` has the dtype of ``x``."""
    out: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate half-split pairs of the last dim (2 D' wide) by tables that broadcast to [..., T, D']."""
    out: Tensor = _Rope.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    out: Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def path_attention(q: Tensor, mask: Tensor, scale: float, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of rows ``q`` [B*G, H/G, T, D] over ``keys[0]`` [B*G, T, D] under ``mask`` [T, T] (additive) and, for
    each later list entry i, over the single key ``keys[i][:, t]`` of the row's own path. Returns the shape of ``q``."""
    out: Tensor = _PathAttention.apply(q, mask, scale, *keys, *values)  # type: ignore[no-untyped-call]
    return out


def distil_loss(
    state_NE: Tensor, teacher_NU: Tensor, target_N: Tensor, head_UE: Tensor, shift_U: Tensor, ce_weight: float
) -> Tensor:
    """Mean over rows of KL (up to the teacher's entropy) + ``ce_weight`` * cross entropy of ``target_N``.

    A target of -1 is outside the columns and adds no cross entropy. ``shift_U`` corrects the logits of sampled columns.
    The head gets no gradient.
    """
    out: Tensor = _DistilLoss.apply(state_NE, teacher_NU, target_N, head_UE, shift_U, ce_weight)  # type: ignore[no-untyped-call]
    return out

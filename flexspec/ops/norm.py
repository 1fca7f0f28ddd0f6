"""rms_norm: root-mean-square normalisation over the last dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexspec.ops.checks import activation, require, same_dtype
from flexspec.ops.elementwise import flops_per_element
from flexspec.ops.record import Attrs, KernelKey, OpRecord, TpLayout, io_bytes, register
from flexspec.types import TensorType

if TYPE_CHECKING:
    import torch


def _shape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    x, weight = types
    same_dtype("rms_norm", types)
    require(len(x.dims) in (2, 3), "rms_norm", types, "x of rank 2 [T,E] or rank 3 [T,H,D]")
    require(weight.dims == x.dims[-1:], "rms_norm", types, f"a weight of dims [{x.dims[-1]}], the last dim of x")
    eps = attrs["eps"]
    require(isinstance(eps, float) and eps > 0.0, "rms_norm", types, f"eps above 0 (found eps={eps!r})")
    return (activation(x, x.dims),)


def _reference(inputs: Sequence[torch.Tensor], attrs: Attrs) -> tuple[torch.Tensor, ...]:
    import torch

    x, weight = inputs
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    eps = attrs["eps"]
    assert isinstance(eps, float)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(x.dtype),)


RMS_NORM = register(
    OpRecord(
        name="rms_norm",
        doc="x / sqrt(mean(x^2) + eps) * weight over the last dim; statistics in float32.",
        arity=(2, 2),
        shape=_shape,
        flops=flops_per_element(4),
        bytes=io_bytes,
        layouts=(
            TpLayout("replicated", (None, None), (None,)),
            TpLayout("heads", (1, None), (1,), operand_dims=3),
        ),
        reference=_reference,
        kernel=KernelKey(cpu="rms_norm"),
        attrs={"eps": float},
    )
)

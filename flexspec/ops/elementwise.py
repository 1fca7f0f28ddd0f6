"""Element-wise operators: add and swiglu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexspec.ops.checks import activation, require, same_dtype
from flexspec.ops.record import Attrs, Count, KernelKey, OpRecord, ShapeRule, TpLayout, io_bytes, register
from flexspec.types import TensorType

if TYPE_CHECKING:
    import torch


def binary_shape(op: str) -> ShapeRule:
    """The shape rule of an operator over two tensors of one type."""

    def shape(types: Sequence[TensorType], _attrs: Attrs) -> tuple[TensorType, ...]:
        same_dtype(op, types)
        require(types[0].dims == types[1].dims, op, types, "two tensors of equal dims")
        return (activation(types[0], types[0].dims),)

    return shape


def flops_per_element(count: int) -> Count:
    """A flop rule: ``count`` operations per output element."""

    def flops(_ins: Sequence[TensorType], outs: Sequence[TensorType], _attrs: Attrs, sizes: dict[str, int]) -> int:
        return count * outs[0].elements(sizes)

    return flops


def _add(inputs: Sequence[torch.Tensor], _attrs: Attrs) -> tuple[torch.Tensor, ...]:
    return (inputs[0] + inputs[1],)


def _swiglu(inputs: Sequence[torch.Tensor], _attrs: Attrs) -> tuple[torch.Tensor, ...]:
    import torch

    gate, up = inputs
    return (torch.nn.functional.silu(gate) * up,)


_REPLICATED = TpLayout("replicated", (None, None), (None,))
_SPLIT = TpLayout("split", (1, 1), (1,))

ADD = register(
    OpRecord(
        name="add",
        doc="a + b for two tensors of equal type (the residual connection).",
        arity=(2, 2),
        shape=binary_shape("add"),
        flops=flops_per_element(1),
        bytes=io_bytes,
        layouts=(_REPLICATED, _SPLIT, TpLayout("partial", ("partial", "partial"), ("partial",))),
        reference=_add,
        kernel=KernelKey(cpu="rowwise", triton="rowwise", expr="x0 + x1"),
    )
)

SWIGLU = register(
    OpRecord(
        name="swiglu",
        doc="silu(gate) * up, the gated unit of the Llama MLP.",
        arity=(2, 2),
        shape=binary_shape("swiglu"),
        flops=flops_per_element(5),
        bytes=io_bytes,
        layouts=(_REPLICATED, _SPLIT),
        reference=_swiglu,
        kernel=KernelKey(cpu="rowwise", triton="rowwise", expr="x0 / (1.0f + fs_exp(-x0)) * x1"),
    )
)

"""split_heads and merge_heads: reshapes between [T, H*D] and [T, H, D]; no data moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexspec.ops.checks import activation, require
from flexspec.ops.record import Attrs, KernelKey, OpRecord, TpLayout, register
from flexspec.types import TensorType

if TYPE_CHECKING:
    import torch


def _split_shape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    (x,) = types
    heads = attrs["heads"]
    require(len(x.dims) == 2 and x.dtype.is_float, "split_heads", types, "a floating-point x of rank 2 [T, H*D]")
    rows, width = x.dims
    require(
        isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads == 0,
        "split_heads",
        types,
        f"a last dim that is a multiple of heads={heads}",
    )
    assert isinstance(width, int) and isinstance(heads, int)
    return (activation(x, (rows, heads, width // heads)),)


def _merge_shape(types: Sequence[TensorType], _attrs: Attrs) -> tuple[TensorType, ...]:
    (x,) = types
    require(len(x.dims) == 3 and x.dtype.is_float, "merge_heads", types, "a floating-point x of rank 3 [T,H,D]")
    rows, heads, head_dim = x.dims
    require(isinstance(heads, int) and isinstance(head_dim, int), "merge_heads", types, "known dims H and D")
    assert isinstance(heads, int) and isinstance(head_dim, int)
    return (activation(x, (rows, heads * head_dim)),)


def _no_cost(_ins: Sequence[TensorType], _outs: Sequence[TensorType], _attrs: Attrs, _sizes: dict[str, int]) -> int:
    return 0


def _split(inputs: Sequence[torch.Tensor], attrs: Attrs) -> tuple[torch.Tensor, ...]:
    heads = attrs["heads"]
    assert isinstance(heads, int)
    return (inputs[0].reshape(inputs[0].shape[0], heads, inputs[0].shape[1] // heads),)


def _merge(inputs: Sequence[torch.Tensor], _attrs: Attrs) -> tuple[torch.Tensor, ...]:
    return (inputs[0].flatten(1),)


_REPLICATED = TpLayout("replicated", (None,), (None,))

SPLIT_HEADS = register(
    OpRecord(
        name="split_heads",
        doc="[T, H*D] -> [T, H, D] (a view). Under layout `heads` a rank's ``heads`` is its share.",
        arity=(1, 1),
        shape=_split_shape,
        flops=_no_cost,
        bytes=_no_cost,
        layouts=(_REPLICATED, TpLayout("heads", (1,), (1,), scaled_attrs=("heads",))),
        reference=_split,
        kernel=KernelKey(cpu="view"),
        attrs={"heads": int},
    )
)

MERGE_HEADS = register(
    OpRecord(
        name="merge_heads",
        doc="[T, H, D] -> [T, H*D] (a view).",
        arity=(1, 1),
        shape=_merge_shape,
        flops=_no_cost,
        bytes=_no_cost,
        layouts=(_REPLICATED, TpLayout("heads", (1,), (1,))),
        reference=_merge,
        kernel=KernelKey(cpu="view"),
    )
)

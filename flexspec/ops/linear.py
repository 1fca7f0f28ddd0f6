"""Matrix products with weights [N,K]: linear, and its fused forms linear_group, linear_swiglu and linear_add.

Only passes make the fused forms; each equals the canonical operators it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flexspec.ops.checks import activation, extent, require, same_dtype
from flexspec.ops.record import Attrs, Count, KernelKey, OpRecord, TpLayout, io_bytes, register
from flexspec.types import Dim, TensorType

if TYPE_CHECKING:
    import torch


def _out_dim(op: str, types: Sequence[TensorType], weight: TensorType, bias: TensorType | None) -> Dim:
    """N of one product ``types[0] @ weight.T (+ bias)``, after checking that the three fit."""
    x = types[0]
    same_dtype(op, types)
    require(len(x.dims) == 2 and len(weight.dims) == 2, op, types, "x of rank 2 [T,K] and a weight of rank 2 [N,K]")
    require(weight.dims[1] == x.dims[1], op, types, f"a weight of dims [N,{x.dims[1]}], K being the last dim of x")
    if bias is not None:
        require(bias.dims == weight.dims[:1], op, types, f"a bias of dims [{weight.dims[0]}]")
    return weight.dims[0]


def _linear_shape(types: Sequence[TensorType], _attrs: Attrs) -> tuple[TensorType, ...]:
    n = _out_dim("linear", types, types[1], types[2] if len(types) == 3 else None)
    return (activation(types[0], (types[0].dims[0], n)),)


def group_parts(count: int, biased: bool) -> list[tuple[int, int | None]]:
    """Input positions (weight, bias or None) of each product in a linear_group."""
    return [(1 + i, 1 + count + i if biased else None) for i in range(count)]


def _parts(attrs: Attrs) -> list[tuple[int, int | None]]:
    count, biased = attrs["count"], attrs["biased"]
    assert isinstance(count, int) and isinstance(biased, bool)
    return group_parts(count, biased)


def _group_shape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    count, biased = attrs["count"], attrs["biased"]
    assert isinstance(count, int)
    wanted = 1 + count * (2 if biased else 1)
    require(
        count >= 1 and len(types) == wanted,
        "linear_group",
        types,
        f"x, count={count} weights" + (" and as many biases" if biased else ""),
    )
    dims = [
        _out_dim("linear_group", types, types[w], None if b is None else types[b]) for w, b in _parts(attrs)
    ]  # fmt: skip
    return tuple(activation(types[0], (types[0].dims[0], n)) for n in dims)


def _swiglu_shape(types: Sequence[TensorType], _attrs: Attrs) -> tuple[TensorType, ...]:
    n = _out_dim("linear_swiglu", types, types[1], None)
    require(types[1].dims == types[2].dims, "linear_swiglu", types, "gate and up weights of equal dims")
    return (activation(types[0], (types[0].dims[0], n)),)


def _add_shape(types: Sequence[TensorType], _attrs: Attrs) -> tuple[TensorType, ...]:
    n = _out_dim("linear_add", types, types[1], types[3] if len(types) == 4 else None)
    dims = (types[0].dims[0], n)
    require(types[2].dims == dims, "linear_add", types, f"a residual of dims [{dims[0]},{dims[1]}]")
    return (activation(types[0], dims),)


def _flops(weights: Callable[[Attrs], Sequence[int]]) -> Count:
    """2 T N K for each weight (their input positions), and one operation per output element for the addend."""

    def flops(ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Attrs, sizes: dict[str, int]) -> int:
        rows = extent(ins[0].dims[0], sizes)
        products = sum(2 * rows * ins[i].elements(sizes) for i in weights(attrs))
        return products + sum(t.elements(sizes) for t in outs)

    return flops


def _linear(inputs: Sequence[torch.Tensor], _attrs: Attrs) -> tuple[torch.Tensor, ...]:
    import torch

    return (torch.nn.functional.linear(*inputs),)


def _group(inputs: Sequence[torch.Tensor], attrs: Attrs) -> tuple[torch.Tensor, ...]:
    import torch

    linear = torch.nn.functional.linear
    return tuple(linear(inputs[0], inputs[w], None if b is None else inputs[b]) for w, b in _parts(attrs))


def _linear_swiglu(inputs: Sequence[torch.Tensor], _attrs: Attrs) -> tuple[torch.Tensor, ...]:
    from torch.nn import functional

    x, gate, up = inputs
    return (functional.silu(functional.linear(x, gate)) * functional.linear(x, up),)


def _linear_add(inputs: Sequence[torch.Tensor], _attrs: Attrs) -> tuple[torch.Tensor, ...]:
    import torch

    x, weight, residual, *bias = inputs
    return (residual + torch.nn.functional.linear(x, weight, *bias),)


_REPLICATED = TpLayout("replicated", (None,), (None,))
_COLUMN = TpLayout("column", (None, 0), (1,))

LINEAR = register(
    OpRecord(
        name="linear",
        doc="x [T,K] @ weight [N,K]^T (+ bias [N]) -> [T,N].",
        arity=(2, 3),
        shape=_linear_shape,
        flops=_flops(lambda attrs: (1,)),
        bytes=io_bytes,
        layouts=(
            _REPLICATED,
            _COLUMN,
            TpLayout("row", (1, 1, "partial"), ("partial",)),
        ),
        reference=_linear,
        kernel=KernelKey(cpu="linear"),
        products=(0,),
    )
)

LINEAR_GROUP = register(
    OpRecord(
        name="linear_group",
        doc="linear(x, w_i[, b_i]) for i < count: x, then all weights, then (if biased) all biases; count outputs.",
        arity=(2, 17),
        shape=_group_shape,
        flops=_flops(lambda attrs: [w for w, _ in _parts(attrs)]),
        bytes=io_bytes,
        layouts=(_REPLICATED, _COLUMN),
        reference=_group,
        kernel=KernelKey(cpu="linear_group"),
        products=(0,),
        attrs={"count": int, "biased": bool},
    )
)

LINEAR_SWIGLU = register(
    OpRecord(
        name="linear_swiglu",
        doc="silu(x @ w_gate^T) * (x @ w_up^T) -> [T,F], x read once.",
        arity=(3, 3),
        shape=_swiglu_shape,
        flops=_flops(lambda attrs: (1, 2)),
        bytes=io_bytes,
        layouts=(_REPLICATED, _COLUMN),
        reference=_linear_swiglu,
        kernel=KernelKey(cpu="linear_swiglu"),
        products=(0,),
    )
)

LINEAR_ADD = register(
    OpRecord(
        name="linear_add",
        doc="residual [T,N] + linear(x, weight[, bias]); operands x, weight, residual[, bias].",
        arity=(3, 4),
        shape=_add_shape,
        flops=_flops(lambda attrs: (1,)),
        bytes=io_bytes,
        layouts=(
            _REPLICATED,
            TpLayout("column", (None, 0, 1, 0), (1,)),
            TpLayout("row", (1, 1, "partial", "partial"), ("partial",)),
        ),
        reference=_linear_add,
        kernel=KernelKey(cpu="linear_add"),
        products=(0,),
    )
)

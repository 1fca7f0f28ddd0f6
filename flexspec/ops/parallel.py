"""Operators between ranks: partition, combine, replicate, reduce (all-reduce), send and recv.

Model files never call them; compiler/partition/cut_ranks.py writes them. The reference of an exchange takes the
operands of all ranks of its group, in the group's order, and returns what each of them then has: a transport collects
the operands and calls it, or does the same by messages. ``partition`` is local.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flexspec.graph import as_int
from flexspec.ops.checks import activation, require
from flexspec.ops.elementwise import flops_per_element
from flexspec.ops.record import (
    EXCHANGE,
    Attrs,
    Collective,
    KernelKey,
    OpRecord,
    Reference,
    ShapeRule,
    io_bytes,
    register,
)
from flexspec.types import DType, Role, TensorType

if TYPE_CHECKING:
    import torch

_EXCHANGE = KernelKey(cpu="exchange", triton=EXCHANGE)


def _ints(attrs: Attrs, key: str) -> tuple[int, ...]:
    value = attrs[key]
    assert isinstance(value, tuple)
    return tuple(item if isinstance(item, int) else -1 for item in value)


def _check_group(op: str, types: Sequence[TensorType], attrs: Attrs) -> tuple[int, ...]:
    ranks = _ints(attrs, "ranks")
    require(
        len(ranks) > 0 and len(set(ranks)) == len(ranks) and min(ranks) >= 0,
        op, types, f"different ranks, none negative (found ranks={list(ranks)})",
    )  # fmt: skip
    return ranks


def _cut_dim(op: str, types: Sequence[TensorType], attrs: Attrs) -> int:
    """The size of the dim that is cut."""
    dim = as_int(attrs["dim"])
    size = types[0].dims[dim] if 0 <= dim < len(types[0].dims) else None
    require(
        types[0].dtype.is_float and isinstance(size, int), op, types,
        f"a floating-point x with a fixed size along dim={dim}",
    )  # fmt: skip
    assert isinstance(size, int)
    return size


def _resized(x: TensorType, dim: int, size: int) -> tuple[TensorType]:
    return (activation(x, (*x.dims[:dim], size, *x.dims[dim + 1 :])),)


def _partition_shape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    size, first, end = _cut_dim("partition", types, attrs), as_int(attrs["first"]), as_int(attrs["end"])
    require(0 <= first < end <= size, "partition", types, f"0 <= first={first} < end={end} <= {size}")
    return _resized(types[0], as_int(attrs["dim"]), end - first)


def _combine_shape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    ranks, size = _check_group("combine", types, attrs), _cut_dim("combine", types, attrs)
    sizes, part = _ints(attrs, "sizes"), as_int(attrs["part"])
    require(
        len(sizes) == len(ranks) and min(sizes) > 0 and 0 <= part < len(ranks) and sizes[part] == size,
        "combine", types, f"a size above 0 for each rank, with {size} for part={part} (found {list(sizes)})",
    )  # fmt: skip
    return _resized(types[0], as_int(attrs["dim"]), sum(sizes))


def _reduce_shape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    _check_group("reduce", types, attrs)
    require(types[0].dtype.is_float, "reduce", types, "a floating-point x")
    return (activation(types[0], types[0].dims),)


def _arriving(op: str, types: Sequence[TensorType], attrs: Attrs) -> TensorType:
    """The type of a tensor that may come from another rank; it has the rows of the operand."""
    columns, name = _ints(attrs, "columns"), attrs["dtype"]
    dtype = next((dtype for dtype in DType if dtype.value == name), None)
    require(dtype is not None and dtype.is_float, op, types, f"a floating-point dtype (found dtype={name!r})")
    require(all(size > 0 for size in columns), op, types, f"columns above 0 (found {list(columns)})")
    assert dtype is not None
    arriving = TensorType(dtype, (types[0].dims[0], *columns), Role.ACTIVATION)
    counts_rows = len(types[0].dims) == 1 and types[0].dtype is DType.I32
    same = (types[0].dtype, types[0].dims) == (arriving.dtype, arriving.dims)
    require(
        counts_rows or same, op, types, f"{arriving}, or an i32 tensor with as many rows on a rank that receives it"
    )
    return arriving


def _replicate_shape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    ranks, root = _check_group("replicate", types, attrs), as_int(attrs["root"])
    require(root in ranks, "replicate", types, f"a root among ranks={list(ranks)} (found root={root})")
    return (_arriving("replicate", types, attrs),)


def _send_shape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    _check_peer("send", types, attrs, "to")
    require(types[0].dtype.is_float, "send", types, "a floating-point x")
    return (activation(types[0], types[0].dims),)


def _recv_shape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    _check_peer("recv", types, attrs, "source")
    return (_arriving("recv", types, attrs),)


def _check_peer(op: str, types: Sequence[TensorType], attrs: Attrs, peer: str) -> None:
    require(
        as_int(attrs[peer]) >= 0 and as_int(attrs["channel"]) >= 0,
        op, types, f"{peer} and channel of at least 0 (found {peer}={attrs[peer]}, channel={attrs['channel']})",
    )  # fmt: skip


def _partition(inputs: Sequence[torch.Tensor], attrs: Attrs) -> tuple[torch.Tensor, ...]:
    first = as_int(attrs["first"])
    return (inputs[0].narrow(as_int(attrs["dim"]), first, as_int(attrs["end"]) - first).contiguous(),)


def _combine(inputs: Sequence[torch.Tensor], attrs: Attrs) -> tuple[torch.Tensor, ...]:
    import torch

    return (torch.cat(list(inputs), as_int(attrs["dim"])),)


def _reduce(inputs: Sequence[torch.Tensor], _attrs: Attrs) -> tuple[torch.Tensor, ...]:
    """The sum in rank order, in float32 or wider."""
    import torch

    total = inputs[0].to(torch.promote_types(inputs[0].dtype, torch.float32))
    for part in inputs[1:]:
        total = total + part
    return (total.to(inputs[0].dtype),)


def _replicate(inputs: Sequence[torch.Tensor], attrs: Attrs) -> tuple[torch.Tensor, ...]:
    return (inputs[_ints(attrs, "ranks").index(as_int(attrs["root"]))],)


def _same(inputs: Sequence[torch.Tensor], _attrs: Attrs) -> tuple[torch.Tensor, ...]:
    return (inputs[0],)


def _between_ranks(
    name: str,
    doc: str,
    shape: ShapeRule,
    reference: Reference,
    attrs: Mapping[str, type],
    collective: Collective | None,
    kernel: KernelKey = _EXCHANGE,
) -> OpRecord:
    """The record of an operator with one operand. It has no layouts: layouts are made of these operators."""
    return register(
        OpRecord(
            name=name,
            doc=doc,
            arity=(1, 1),
            shape=shape,
            flops=flops_per_element(1),
            bytes=io_bytes,
            layouts=(),
            reference=reference,
            kernel=kernel,
            attrs=attrs,
            collective=collective,
        )
    )


PARTITION = _between_ranks(
    "partition",
    "A rank's share of a whole x: entries first to end (exclusive) along dim. Local.",
    _partition_shape,
    _partition,
    {"dim": int, "first": int, "end": int},
    None,
    KernelKey(cpu="partition"),
)
COMBINE = _between_ranks(
    "combine",
    "The shares of all ranks joined along dim (all-gather); sizes by rank, sizes[part] is this rank's.",
    _combine_shape,
    _combine,
    {"dim": int, "ranks": tuple, "sizes": tuple, "part": int},
    Collective.ALL_GATHER,
)
REDUCE = _between_ranks(
    "reduce",
    "The sum of all ranks' x, on each of them (all-reduce).",
    _reduce_shape,
    _reduce,
    {"ranks": tuple},
    Collective.ALL_REDUCE,
)
REPLICATE = _between_ranks(
    "replicate",
    "The root's x on all ranks (broadcast); on the others the operand only gives the number of rows.",
    _replicate_shape,
    _replicate,
    {"ranks": tuple, "root": int, "dtype": str, "columns": tuple},
    Collective.BROADCAST,
)
SEND = _between_ranks(
    "send",
    "Send x to the rank `to`, which receives it with a recv of this channel; the result is x itself.",
    _send_shape,
    _same,
    {"to": int, "channel": int},
    Collective.SEND,
    KernelKey(cpu="send", triton=EXCHANGE),
)
RECV = _between_ranks(
    "recv",
    "What rank `source` sent on this channel: [rows of the operand, *columns]; the operand is a step input.",
    _recv_shape,
    _same,
    {"source": int, "channel": int, "dtype": str, "columns": tuple},
    Collective.RECV,
)

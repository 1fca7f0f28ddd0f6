"""Row lookups: embedding (rows of a weight by token id) and select_rows (rows of an activation by index)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexspec.graph import as_int
from flexspec.ops.checks import activation, require
from flexspec.ops.record import Attrs, KernelKey, OpRecord, TpLayout, register
from flexspec.types import DType, TensorType

if TYPE_CHECKING:
    import torch


def _lookup_shape(op: str, table: TensorType, index: TensorType, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    require(index.dtype is DType.I32 and len(index.dims) == 1, op, types, "i32 indices of rank 1")
    require(
        table.dtype.is_float and len(table.dims) == 2, op, types, "a floating-point tensor of rank 2 to read rows from"
    )
    return (activation(table, (index.dims[0], table.dims[1])),)


def _embedding_shape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    first, rows, local_rows = attrs.get("first_row", 0), attrs.get("rows"), types[1].dims[0]
    require(isinstance(first, int) and first >= 0, "embedding", types, f"first_row of at least 0 (found {first!r})")
    derived = _lookup_shape("embedding", types[1], types[0], types)
    ints = isinstance(first, int) and isinstance(rows, int) and isinstance(local_rows, int)
    fits = ints and as_int(first) + as_int(local_rows) <= as_int(rows)
    require(
        fits if "first_row" in attrs else rows is None,
        "embedding", types, f"first_row and rows of a table that contains these (found {first!r}, {rows!r})",
    )  # fmt: skip
    return derived


def _embedding_bounds(types: Sequence[TensorType], attrs: Attrs) -> dict[int, int]:
    """Ids lie below the rows of the whole table, even if a rank has only some of them."""
    rows = attrs.get("rows", types[1].dims[0])
    return {0: rows} if isinstance(rows, int) else {}


def _select_shape(types: Sequence[TensorType], _attrs: Attrs) -> tuple[TensorType, ...]:
    return _lookup_shape("select_rows", types[0], types[1], types)


def _flops(_ins: Sequence[TensorType], outs: Sequence[TensorType], _attrs: Attrs, sizes: dict[str, int]) -> int:
    """A copy: one operation per element, so that a schedule by flops still counts it."""
    return outs[0].elements(sizes)


def _embedding_bytes(
    ins: Sequence[TensorType], outs: Sequence[TensorType], _attrs: Attrs, sizes: dict[str, int]
) -> int:
    """Ids, and the rows read and written; the rest of the table is not read."""
    return ins[0].bytes(sizes) + 2 * outs[0].bytes(sizes)


def _select_bytes(ins: Sequence[TensorType], outs: Sequence[TensorType], _attrs: Attrs, sizes: dict[str, int]) -> int:
    return ins[1].bytes(sizes) + 2 * outs[0].bytes(sizes)


def _embedding(inputs: Sequence[torch.Tensor], attrs: Attrs) -> tuple[torch.Tensor, ...]:
    ids, table = inputs
    first = attrs.get("first_row")
    if first is None:
        return (table[ids.long()],)
    assert isinstance(first, int)
    rows = ids.long() - first
    is_local = (rows >= 0) & (rows < table.shape[0])
    return (table[rows.clamp(0, table.shape[0] - 1)] * is_local[:, None].to(table.dtype),)


def _select(inputs: Sequence[torch.Tensor], _attrs: Attrs) -> tuple[torch.Tensor, ...]:
    x, rows = inputs
    return (x[rows.long()],)


EMBEDDING = register(
    OpRecord(
        name="embedding",
        doc="Rows of weight [V,E] by id or position [T]. The weight may be part of a table of ``rows`` rows, from "
        "first_row on; all other rows give zeros.",
        arity=(2, 2),
        shape=_embedding_shape,
        flops=_flops,
        bytes=_embedding_bytes,
        layouts=(
            TpLayout("replicated", (None, None), (None,)),
            TpLayout("vocabulary", (None, 0), ("partial",), first_attr="first_row", whole_attr="rows"),
            TpLayout("hidden", (None, 1), (1,)),
        ),
        reference=_embedding,
        kernel=KernelKey(cpu="embedding"),
        optional_attrs={"first_row": int, "rows": int},
        bounds=_embedding_bounds,
    )
)

SELECT_ROWS = register(
    OpRecord(
        name="select_rows",
        doc="Rows of x [T,E] by index [L]: only rows whose logits are needed go through the LM head.",
        arity=(2, 2),
        shape=_select_shape,
        flops=_flops,
        bytes=_select_bytes,
        layouts=(TpLayout("replicated", (None, None), (None,)), TpLayout("hidden", (1, None), (1,))),
        reference=_select,
        kernel=KernelKey(cpu="select_rows"),
    )
)

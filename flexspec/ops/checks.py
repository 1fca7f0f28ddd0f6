"""Small helpers that shape rules share: a refusal that shows the operand types, and the usual derived types.

Registers no operator.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexspec.errors import GraphError
from flexspec.types import Dim, Role, TensorType


def require(ok: bool, op: str, types: Sequence[TensorType], expected: str) -> None:
    """Raise GraphError showing the operand types of ``op`` unless ``ok``."""
    if not ok:
        raise GraphError(
            f"{op}({', '.join(str(t) for t in types)})", expected, f"change the operands of {op} so that they fit"
        )


def same_dtype(op: str, types: Sequence[TensorType]) -> None:
    """Refuse operands that are not all of one floating dtype."""
    first = types[0].dtype
    require(
        first.is_float and all(t.dtype is first for t in types), op, types, "operands of one floating dtype (f32, bf16)"
    )


def activation(like: TensorType, dims: tuple[Dim, ...]) -> TensorType:
    """An activation of the dtype of ``like``."""
    return TensorType(like.dtype, dims, Role.ACTIVATION)


def extent(dim: Dim, sizes: dict[str, int]) -> int:
    """A dim as a number, its letter bound by ``sizes``. Raises KeyError for an unbound letter."""
    return dim if isinstance(dim, int) else sizes[dim]

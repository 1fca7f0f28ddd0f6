"""Helpers that shape rules share: an error that shows the operand types, and the usual derived types.

Registers no operator.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexspec.errors import GraphError
from flexspec.types import Dim, Role, TensorType


def require(ok: bool, op: str, types: Sequence[TensorType], expected: str) -> None:
    """Raise GraphError, with the operand types of ``op``, unless ``ok``."""
    if not ok:
        raise GraphError(
            f"{op}({', '.join(str(t) for t in types)})", expected, f"change the operands of {op} so that they fit"
        )


def same_dtype(op: str, types: Sequence[TensorType]) -> None:
    """Raise GraphError unless all operands have the same floating-point dtype."""
    first = types[0].dtype
    require(
        first.is_float and all(t.dtype is first for t in types),
        op,
        types,
        "operands of one floating-point dtype (f32, bf16)",
    )


def activation(like: TensorType, dims: tuple[Dim, ...]) -> TensorType:
    """An activation with the dtype of ``like``."""
    return TensorType(like.dtype, dims, Role.ACTIVATION)


def extent(dim: Dim, sizes: dict[str, int]) -> int:
    """The size of a dim; ``sizes`` has those of letters. Raises KeyError for a letter without one."""
    return dim if isinstance(dim, int) else sizes[dim]

"""Tensor types of the operator graph: dtype, named symbolic dims, role.

Shape letters, used everywhere: R requests, T tokens of the step (tree nodes of all requests, packed), L logit rows,
B pages of a request, P pages of the pool, W ancestor words, S context, H heads, G kv heads, D head dim, E hidden,
F ffn, V vocab, X experts. A dim is an int or one of these letters while it is not yet known.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Dim = int | str

PAGE_TOKENS = 32  # tokens a KV page; also the key block of attention (kPage), so that block edges are fixed by position


class DType(Enum):
    """Element types; the value is the name in the text form."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I8 = "i8"
    I32 = "i32"
    I64 = "i64"
    U64 = "u64"

    @property
    def size_bytes(self) -> int:
        return {"f32": 4, "f16": 2, "bf16": 2, "i8": 1, "i32": 4, "i64": 8, "u64": 8}[self.value]

    @property
    def is_float(self) -> bool:
        return self in (DType.F32, DType.F16, DType.BF16)


class Role(Enum):
    """What a tensor is for; passes and the memory model read it."""

    WEIGHT = "weight"
    ACTIVATION = "activation"
    KV = "kv"
    IDS = "ids"
    TREE = "tree"


@dataclass(frozen=True, slots=True)
class TensorType:
    """``dtype[dims]:role``; dims are ints or symbolic letters."""

    dtype: DType
    dims: tuple[Dim, ...]
    role: Role

    def __str__(self) -> str:
        return f"{self.dtype.value}[{','.join(str(d) for d in self.dims)}]:{self.role.value}"

    def elements(self, sizes: dict[str, int]) -> int:
        """Number of elements with the symbolic dims bound by ``sizes``. Raises KeyError for an unbound letter."""
        n = 1
        for dim in self.dims:
            n *= dim if isinstance(dim, int) else sizes[dim]
        return n

    def bytes(self, sizes: dict[str, int]) -> int:
        return self.elements(sizes) * self.dtype.size_bytes

"""Tensor types of the operator graph: dtype, named symbolic dims, role, and how a weight is stored.

Shape letters, used everywhere: R requests, T tokens of the step (tree nodes of all requests, packed), L logit rows,
B pages of a request, P pages of the pool, W ancestor words, S context, H heads, G kv heads, D head dim, E hidden,
F ffn, V vocab, X experts. A dim is an int, or one of these letters if its size is not yet known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Dim = int | str

PAGE_TOKENS = 32  # tokens per KV page; also attention's key block (kPage), so that block edges are fixed by position


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
class WeightFormat:
    """How a weight matrix is stored. Operators never see it: they compute with its values in the weight's dtype.

    A format is one file in flexspec/weight_formats, found by its presence. Rows are stored one after the other, in
    blocks of consecutive elements: a matrix may be cut between any two rows, and along its rows between blocks.
    """

    name: str  # in the text form, in options and on pages
    doc: str
    dtype: DType | None  # it is that dtype's plain form; None: it is neither f32, bf16 nor f16
    block_elements: int  # a row has a multiple of these; 1: one number per element
    block_bytes: int
    # Dtypes that represent every stored value exactly; for others, values are rounded to nearest even when expanded.
    exact: tuple[DType, ...]
    # float32 [..., K] -> the stored rows [..., bytes or numbers]. Raises OverflowError for a value out of range.
    encode: Callable[[NDArray[np.float32]], NDArray[np.generic]]
    # What is stored, in float32. ``encode`` of it gives the same bytes again. Bytes of zero are values of zero.
    decode: Callable[[NDArray[np.generic]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class TensorType:
    """``dtype[dims]:role``, or ``dtype[dims]:weight:format`` for a weight stored in another format."""

    dtype: DType  # what operators compute with
    dims: tuple[Dim, ...]
    role: Role
    format: WeightFormat | None = None  # how it is stored; None: in its dtype

    def __str__(self) -> str:
        stored = f":{self.format.name}" if self.format else ""
        return f"{self.dtype.value}[{','.join(str(d) for d in self.dims)}]:{self.role.value}{stored}"

    @property
    def stored(self) -> str:
        """Name of the format in which a weight is stored: that of its dtype by default."""
        return self.format.name if self.format else self.dtype.value

    def elements(self, sizes: dict[str, int]) -> int:
        """Number of elements; ``sizes`` has the symbolic dims. Raises KeyError for a letter that it lacks."""
        n = 1
        for dim in self.dims:
            n *= dim if isinstance(dim, int) else sizes[dim]
        return n

    def bytes(self, sizes: dict[str, int]) -> int:
        """Bytes as stored."""
        if self.format is None:
            return self.elements(sizes) * self.dtype.size_bytes
        return self.elements(sizes) // self.format.block_elements * self.format.block_bytes

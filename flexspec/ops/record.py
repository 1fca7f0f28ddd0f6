"""The operator record: everything the rest of the system knows about an operator, in one place.

An operator family is one file in this folder; it builds records and registers them with :func:`register`. Verifier,
builder, text form, MLIR dialect, executors and code generators read records instead of testing an operator's name. Two
kinds of code do name operators: the passes, which rewrite them, and kernels/cpu/facts.py, where the tables of embedding
and rope bound the ids and positions of a program. compiler/partition/cut_ranks.py cuts graphs by ``layouts``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flexspec.errors import GraphError
from flexspec.graph import Attr, Node
from flexspec.types import TensorType

if TYPE_CHECKING:
    import torch

Attrs = Mapping[str, Attr]
ShapeRule = Callable[[Sequence[TensorType], Attrs], tuple[TensorType, ...]]
Count = Callable[[Sequence[TensorType], Sequence[TensorType], Attrs, dict[str, int]], int]
Reference = Callable[[Sequence["torch.Tensor"], Attrs], tuple["torch.Tensor", ...]]


@dataclass(frozen=True, slots=True)
class TpLayout:
    """One legal tensor-parallel layout.

    ``inputs`` and ``outputs`` give, per operand, the dim index that is split over the TP axis, None for replicated, or
    "partial" for a partial sum; the last entry also stands for all further operands. ``collective`` is what makes the
    output whole again ("all_reduce", "all_gather", or None when consumers take it split).

    All split dims of a layout are cut alike, in proportion to their sizes; ranks' shares differ and make up the whole,
    except at the input and output positions in ``covers``: there a rank holds what its share of the others needs, and
    ranks may hold the same (kv heads, where there are more ranks than kv heads). ``scaled_attrs`` are sizes that are
    cut with the operands, ``first_attr`` is set to where a rank's share begins, and the layout is legal only where
    operand 0 has ``operand_dims`` dims (None: any).
    """

    name: str
    inputs: tuple[int | str | None, ...]
    outputs: tuple[int | str | None, ...]
    collective: str | None = None
    covers: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    scaled_attrs: tuple[str, ...] = ()
    first_attr: str | None = None
    operand_dims: int | None = None

    def input_dim(self, position: int) -> int | str | None:
        return self.inputs[min(position, len(self.inputs) - 1)]

    def output_dim(self, position: int) -> int | str | None:
        return self.outputs[min(position, len(self.outputs) - 1)]


REFERENCE = "torch"  # KernelKey.triton: the reference (cuBLAS through torch) is the kernel
EXCHANGE = "exchange"  # KernelKey.triton: ranks meet in the node, and the executor's transport runs it


@dataclass(frozen=True, slots=True)
class KernelKey:
    """Which kernel family runs the operator on each backend. An unknown key is an error when a model is compiled."""

    cpu: str  # a key of kernels/cpu/emit.py's EMITTERS
    triton: str = REFERENCE  # a family of kernels/gpu/families, REFERENCE or EXCHANGE
    # What "rowwise", on either backend, computes for each element: an expression over the operands ``x0`` and ``x1``,
    # with ``{name}`` for each attribute. In C++, where an operand is a vector of 16 floats, any expression of
    # templates/cpu/simd.h; Triton has fs_exp, fs_tanh, vmax, vmin and ``mask ? a : b`` of it.
    expr: str | None = None


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One operator. ``shape`` raises GraphError with the operand types when they do not fit.

    ``exchange``: ranks meet here, and an executor hands the node to its transport (see ops/parallel.py).
    """

    name: str
    doc: str
    arity: tuple[int, int]  # least and most inputs
    shape: ShapeRule
    flops: Count
    bytes: Count
    layouts: tuple[TpLayout, ...]
    reference: Reference
    kernel: KernelKey
    attrs: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    optional_attrs: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    exchange: bool = False


_RECORDS: dict[str, OpRecord] = {}


def register(record: OpRecord) -> OpRecord:
    """Add a record to the table. A second registration of a name is our own bug."""
    assert record.name not in _RECORDS, f"operator {record.name} is declared twice"
    _RECORDS[record.name] = record
    return record


def _load_all() -> None:
    import flexspec.ops as package

    for module in pkgutil.iter_modules(package.__path__):
        if module.name != "record":
            importlib.import_module(f"flexspec.ops.{module.name}")


def all_records() -> dict[str, OpRecord]:
    """Every operator, by name; imports each family file once."""
    _load_all()
    return dict(sorted(_RECORDS.items()))


def record_of(node: Node | str) -> OpRecord:
    """The record of an operator. Raises GraphError naming the nearest known operators."""
    name = node if isinstance(node, str) else node.op
    if name not in _RECORDS:
        _load_all()
    if name not in _RECORDS:
        import difflib

        near = difflib.get_close_matches(name, _RECORDS, n=3) or sorted(_RECORDS)
        raise GraphError(
            f"unknown operator {name!r}",
            f"one of {', '.join(near)}",
            "use a known operator or add one file to flexspec/ops that registers it",
        )
    return _RECORDS[name]


def io_bytes(inputs: Sequence[TensorType], outputs: Sequence[TensorType], attrs: Attrs, sizes: dict[str, int]) -> int:
    """Bytes moved when every operand is read or written once: the usual ``bytes`` rule."""
    del attrs
    return sum(t.bytes(sizes) for t in (*inputs, *outputs))


def unused(*_: Any) -> None:
    """Mark parameters that a rule's signature needs and its body does not."""

"""The operator record: everything the rest of the system knows about an operator, in one place.

An operator family is one file in this folder; it builds records and registers them with :func:`register`. Verifier,
builder, text form, MLIR dialect, executors and code generators read records instead of testing an operator's name; who
may name one, and why, is a table in tests/ops/test_operator_names.py.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from flexspec.errors import GraphError
from flexspec.graph import Attr, Graph, Node
from flexspec.types import TensorType

if TYPE_CHECKING:
    import torch

Attrs = Mapping[str, Attr]
ShapeRule = Callable[[Sequence[TensorType], Attrs], tuple[TensorType, ...]]
Count = Callable[[Sequence[TensorType], Sequence[TensorType], Attrs, dict[str, int]], int]
Bounds = Callable[[Sequence[TensorType], Attrs], Mapping[int, int]]
Reference = Callable[[Sequence["torch.Tensor"], Attrs], tuple["torch.Tensor", ...]]


@dataclass(frozen=True, slots=True)
class TpLayout:
    """One legal tensor-parallel layout.

    All split dims of a layout are cut alike, in proportion to their sizes; the ranks' shares make up the whole.
    ``outputs`` says how an output is made whole again: a partial sum by an all-reduce, shares by an all-gather.
    """

    name: str
    # Per operand the dim that is split over the TP axis, None for replicated, or "partial" for a partial sum; the last
    # entry applies to all further operands too.
    inputs: tuple[int | str | None, ...]
    outputs: tuple[int | str | None, ...]
    # Input and output positions where a rank has whatever its share of the others needs, so that ranks may overlap (kv
    # heads, if there are more ranks than kv heads).
    covers: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    scaled_attrs: tuple[str, ...] = ()  # sizes that are cut with the operands
    first_attr: str | None = None  # set to the start of a rank's share
    whole_attr: str | None = None  # set to the uncut size of the split dim
    operand_dims: int | None = None  # the layout is legal only if operand 0 has this many dims; None: any

    def input_dim(self, position: int) -> int | str | None:
        return self.inputs[min(position, len(self.inputs) - 1)]

    def output_dim(self, position: int) -> int | str | None:
        return self.outputs[min(position, len(self.outputs) - 1)]


class Collective(Enum):
    """How ranks communicate in an operator. A send of one rank and a recv of another make a hop between stages."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    BROADCAST = "broadcast"
    SEND = "send"
    RECV = "recv"


REFERENCE = "torch"  # KernelKey.triton: the reference (cuBLAS through torch) is the kernel
EXCHANGE = "exchange"  # KernelKey.triton: ranks communicate in the node, and the executor's transport runs it


@dataclass(frozen=True, slots=True)
class KernelKey:
    """The kernel family that runs the operator on each backend. Compiling fails for an unknown key."""

    cpu: str  # a key of the EMITTERS of a file in kernels/cpu/emitters
    triton: str = REFERENCE  # a family of kernels/gpu/families, REFERENCE or EXCHANGE
    # What "rowwise", on either backend, computes for each element: an expression of the operands ``x0`` and ``x1``,
    # ``{name}`` for each attribute, numbers (``1.0f``), + - * /, comparisons, ``mask ? a : b`` and the FUNCTIONS of
    # kernels/gpu/expression.py, such as fs_log and vmin.
    expr: str | None = None


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One operator."""

    name: str
    doc: str
    arity: tuple[int, int]  # fewest and most inputs
    shape: ShapeRule  # types of the results; raises GraphError with the operand types if they do not fit
    flops: Count
    bytes: Count  # moved to and from memory
    layouts: tuple[TpLayout, ...]
    reference: Reference
    kernel: KernelKey
    attrs: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    optional_attrs: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    # How ranks communicate in it, if they do. An executor hands the node to its transport (see ops/parallel.py).
    collective: Collective | None = None
    # By position, the bounds below which integer operands must lie: the rows of the table that ids or positions index.
    # None: there are none. flexspec/ops/bounds.py reads it.
    bounds: Bounds | None = None
    products: tuple[int, ...] = ()  # operands multiplied by weight matrices: backends store them in the weights' dtype

    @property
    def exchange(self) -> bool:
        return self.collective is not None


_RECORDS: dict[str, OpRecord] = {}


def register(record: OpRecord) -> OpRecord:
    """Add a record to the table. Registering a name twice is a bug of ours."""
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


def sent_values(graph: Graph) -> set[str]:
    """Names of values that this rank only sends: outputs of its graph that are not results."""
    sends = (node for node in graph.nodes if record_of(node).collective is Collective.SEND)
    return {value.name for node in sends for value in node.outputs}


def io_bytes(inputs: Sequence[TensorType], outputs: Sequence[TensorType], _attrs: Attrs, sizes: dict[str, int]) -> int:
    """Bytes moved if every operand is read or written once: the usual ``bytes`` rule."""
    return sum(t.bytes(sizes) for t in (*inputs, *outputs))

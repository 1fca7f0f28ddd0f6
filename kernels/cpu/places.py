"""Where each value of a lowered graph lives on the CPU: element type, row stride, arena buffer, aliases.

Rules: operands of matrix products are stored in the model's element type ("elem"), everything else in float32. A value
that both kinds of readers want is stored in float32 and converted once. Buffers are reused after their last reader.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flexspec.arithmetic import ceil_div
from flexspec.errors import CompileError
from flexspec.graph import Graph, Node
from flexspec.ops.record import record_of
from flexspec.types import DType, Role


def kernel_of(node: Node) -> str:
    return record_of(node).kernel.cpu


@dataclass(frozen=True, slots=True)
class Place:
    """A view into an arena buffer."""

    buffer: int
    elem: bool  # the model's element type; False: float32
    ld: int  # elements from row to row
    column: int = 0  # first element of a row


@dataclass(slots=True)
class Arena:
    """Buffers by the size of a row; how many rows they have, the same for all, is known at load time."""

    row_bytes: list[int] = field(default_factory=list)
    free: dict[int, list[int]] = field(default_factory=dict)
    padded: set[int] = field(default_factory=set)  # have columns that must stay zero, so no other value reuses them

    def take(self, row_bytes: int, *, padded: bool = False) -> int:
        row_bytes = ceil_div(row_bytes, 64) * 64
        if not padded and self.free.get(row_bytes):
            return self.free[row_bytes].pop()
        self.row_bytes.append(row_bytes)
        if padded:
            self.padded.add(len(self.row_bytes) - 1)
        return len(self.row_bytes) - 1

    def give(self, buffer: int) -> None:
        if buffer not in self.padded:
            self.free.setdefault(self.row_bytes[buffer], []).append(buffer)


def row_stride(columns: int, element_bytes: int) -> int:
    """Elements from row to row: columns padded to 32, then to an odd number of cache lines.

    Otherwise the sixteen rows of a tile would map to a few sets of the L1 cache and evict each other.
    """
    padded = ceil_div(columns, 32) * 32
    lines = padded * element_bytes // 64
    return padded if lines % 2 else padded + 64 // element_bytes


def width(graph: Graph, name: str) -> int:
    """Columns of a value: the product of its dims after the first. Raises CompileError for a symbolic one."""
    columns = 1
    for dim in graph.types()[name].dims[1:]:
        if not isinstance(dim, int):
            raise CompileError(
                f"value {name} of graph {graph.name} has the symbolic dim {dim!r} after its first",
                "row-major activations with fixed columns",
                "reshape it to [T, columns] in the model file",
            )
        columns *= dim
    return columns


def row_count(graph: Graph, name: str) -> str:
    """What the program calls the number of rows of a value. Raises CompileError for rows that are not the step's."""
    dim = graph.types()[name].dims[0]
    if dim not in ("T", "L"):
        raise CompileError(
            f"value {name} has {dim!r} rows", "T or L rows", "keep the row dim symbolic in the model file"
        )
    return f"s.{dim}"


class Roots:
    """Alias classes: views (split_heads, merge_heads) share the storage of what they view."""

    def __init__(self, graph: Graph) -> None:
        self.root: dict[str, str] = {value.name: value.name for value in graph.values()}
        for node in graph.nodes:
            if kernel_of(node) == "view":
                self.root[node.outputs[0].name] = self.root[node.inputs[0]]
        self.last_use: dict[str, int] = {}
        self.matrix_use: set[str] = set()
        self.other_use: set[str] = set()
        for i, node in enumerate(graph.nodes):
            kernel, products = kernel_of(node), record_of(node).products
            for position, name in enumerate(node.inputs):
                root = self.root[name]
                self.last_use[root] = i
                if kernel == "view":
                    continue
                (self.matrix_use if position in products else self.other_use).add(root)
        for name in graph.outputs:
            self.last_use[self.root[name]] = len(graph.nodes)
            self.other_use.add(self.root[name])


def has_exchanges(graph: Graph) -> bool:
    return any(record_of(node).exchange for node in graph.nodes)


def element_type(graph: Graph) -> DType:
    """The dtype of matrix products and of the KV caches.

    Raises CompileError for more than one, and for a dtype without a CPU kernel.
    """
    kinds = {v.type.dtype for v in graph.inputs_of(Role.WEIGHT)}
    caches = {v.type.dtype for v in graph.inputs_of(Role.KV)}
    if len(kinds | caches) != 1 or not kinds | caches <= {DType.F32, DType.BF16}:
        raise CompileError(
            f"graph {graph.name} computes with weights of {_names(kinds)} and KV of {_names(caches)}",
            "all bf16 or all f32",
            "compile with --dtype bf16 or --dtype f32 (weights may be stored otherwise: --weights)",
        )
    return (kinds | caches).pop()


def _names(kinds: set[DType]) -> str:
    return ", ".join(sorted(kind.value for kind in kinds)) or "nothing"

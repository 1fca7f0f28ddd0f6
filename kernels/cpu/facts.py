"""What a built CPU program says of itself: the sizes of everything that is handed to it.

The numbers are compiled into the library, so a loader never has to trust a file beside it: a wrong size is an error
there and not a wild read in a kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from flexspec.errors import CompileError
from flexspec.graph import Graph
from flexspec.kernels.cpu.pack import PackedWeight, packed_bytes
from flexspec.kernels.cpu.places import sends_only
from flexspec.models.registry import expected_weights
from flexspec.types import DType, Role

SYMBOL = "fs_facts"
NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """``outputs``: columns of the logits. Token ids are below ``id_rows`` and positions below ``max_positions``.

    ``feature_columns`` floats a row are put out and ``reads_features`` are read, 0 for none.
    """

    outputs: int
    id_rows: int
    max_positions: int
    feature_columns: int
    reads_features: int
    weight_bytes: tuple[int, ...]

    def numbers(self) -> tuple[int, ...]:
        """As they stand in the library: how many follow, the five sizes, then the bytes of each weight."""
        sizes = (self.outputs, self.id_rows, self.max_positions, self.feature_columns, self.reads_features)
        return (len(sizes) + len(self.weight_bytes), *sizes, *self.weight_bytes)


def read_facts(library: ctypes.CDLL) -> ProgramFacts:
    """The facts of a loaded library. Raises ValueError when it has none."""
    count = ctypes.c_longlong.in_dll(library, SYMBOL).value
    _, outputs, id_rows, positions, columns, read, *weights = (ctypes.c_longlong * (count + 1)).in_dll(library, SYMBOL)
    return ProgramFacts(outputs, id_rows, positions, columns, read, tuple(weights))


def facts_of(graph: Graph, table: tuple[PackedWeight, ...], dtype: DType, feature_columns: int) -> ProgramFacts:
    """The facts of a graph with its weight table. Positions end where the shortest rotary table does.

    A stage before the last has no logits. Raises CompileError when the logits or the embedding have no fixed size.
    """
    types = graph.types()
    # A rank that holds a part of the vocabulary reads any id: those of others give zeros.
    tables = [types[node.inputs[1]].dims[0] for node in graph.nodes if node.op == "embedding" and not node.attrs]
    limits = [node.attr("max_positions") for node in graph.nodes if node.op == "rope"]
    read = [value.type.dims[-1] for value in graph.inputs if value.type.role is Role.ACTIVATION]
    shapes: Mapping[str, tuple[int, ...]] = expected_weights(graph)
    return ProgramFacts(
        outputs=0 if sends_only(graph) else _size(graph, types[graph.outputs[0]].dims[-1]),
        id_rows=min((_size(graph, rows) for rows in tables), default=NO_LIMIT),
        max_positions=min((limit for limit in limits if isinstance(limit, int)), default=NO_LIMIT),
        feature_columns=feature_columns,
        reads_features=_size(graph, read[0]) if read else 0,
        weight_bytes=tuple(packed_bytes(entry, shapes, dtype) for entry in table),
    )


def _size(graph: Graph, dim: int | str) -> int:
    if not isinstance(dim, int):
        raise CompileError(
            f"graph {graph.name} has a size {dim!r} where the program needs a number",
            "fixed sizes of logits, embedding and features",
            "give the model file the number",
        )
    return dim

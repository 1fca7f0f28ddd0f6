"""What a built CPU program states about itself: the sizes of everything that is passed to it.

The numbers are compiled into the library, so a loader never has to trust a file beside it: a wrong size is an error at
load time and not a wild read in a kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from flexspec.graph import Graph
from flexspec.kernels.cpu.pack import PackedWeight, packed_bytes
from flexspec.models.registry import expected_weights
from flexspec.step_sizes import StepSizes, step_sizes

SYMBOL = "fs_facts"


@dataclass(frozen=True, slots=True)
class ProgramFacts(StepSizes):
    """The step's sizes, and the bytes of each weight of the program's table."""

    weight_bytes: tuple[int, ...]

    def numbers(self) -> tuple[int, ...]:
        """As laid out in the library: how many follow, the five sizes, then the bytes of each weight."""
        return (len(_sizes(self)) + len(self.weight_bytes), *_sizes(self), *self.weight_bytes)

    def agrees_with(self, sizes: StepSizes) -> bool:
        """Whether the program was made from a graph of these sizes."""
        return _sizes(self) == _sizes(sizes)


def _sizes(sizes: StepSizes) -> tuple[int, ...]:
    return (sizes.outputs, sizes.id_rows, sizes.max_positions, sizes.feature_columns, sizes.reads_features)


def read_facts(library: ctypes.CDLL) -> ProgramFacts:
    """The facts of a loaded library. Raises ValueError when it has none."""
    count = ctypes.c_longlong.in_dll(library, SYMBOL).value
    _, outputs, id_rows, positions, columns, read, *weights = (ctypes.c_longlong * (count + 1)).in_dll(library, SYMBOL)
    return ProgramFacts(outputs, id_rows, positions, columns, read, tuple(weights))


def facts_of(graph: Graph, table: tuple[PackedWeight, ...]) -> ProgramFacts:
    """The facts of a graph with its weight table. Raises CompileError when a size of the step is not fixed."""
    shapes: Mapping[str, tuple[int, ...]] = expected_weights(graph)
    return ProgramFacts(**asdict(step_sizes(graph)), weight_bytes=tuple(packed_bytes(entry, shapes) for entry in table))

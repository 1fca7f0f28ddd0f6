"""When the steps of a program, and each of its nodes, began and ended.

All times are nanoseconds of the system's steady clock, which the processes of a host share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexspec.kernels.cpu.launch import CpuLibrary

Clock = Callable[[], float]  # seconds of a steady clock


def lower_quartile(values: Sequence[float] | NDArray[np.float64]) -> float:
    """A measured time on an undisturbed machine: whatever else runs on it only ever adds time."""
    return float(np.percentile(values, 25))


@dataclass(slots=True)
class StepTimes:
    """The times of a program's steps."""

    calls_ns: list[tuple[int, int]] = field(default_factory=list)  # begin and end of each step as its caller sees it
    stamps_ns: list[NDArray[np.int64]] = field(default_factory=list)  # as in CpuLibrary.keep_stamps
    _stamps: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, library: CpuLibrary, nodes: int) -> StepTimes:
        """The record of a program of ``nodes`` nodes, empty; raises ArtifactError for one without stamps."""
        return cls(_stamps=library.keep_stamps(nodes))

    def note(self, began_ns: int, ended_ns: int) -> None:
        """Record a step that has run."""
        assert self._stamps is not None
        self.calls_ns.append((began_ns, ended_ns))
        self.stamps_ns.append(self._stamps.copy())

    def arrays(self) -> dict[str, NDArray[np.int64]]:
        """As arrays: calls [steps, 2], stamps [steps, 1 + nodes]; a node without code ends with the one before it."""
        calls = np.array(self.calls_ns, np.int64).reshape(-1, 2)
        width = 0 if self._stamps is None else len(self._stamps)
        stamps = np.array(self.stamps_ns, np.int64).reshape(-1, width)
        return {"calls": calls, "stamps": np.maximum.accumulate(stamps, 1)}

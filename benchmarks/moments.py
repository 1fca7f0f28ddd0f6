"""Fair comparisons: a shared machine drifts within minutes, so rates that are compared must be measured side by side.

Bandwidth is sampled throughout a run, and a peer runs between two runs of ours on its own prompts.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from flexspec.kernels.cpu.build import find_compiler

SOURCE = Path(__file__).resolve().parent / "read_bandwidth.cpp"
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-pthread", "-Wno-psabi")


class Bandwidth:
    """Bytes per second that plain reads of a weight-sized block reach; one program, many samples."""

    def __init__(self, threads: int) -> None:
        self.samples: list[float] = []
        self._threads = threads
        self._folder = tempfile.TemporaryDirectory()
        self._program = str(Path(self._folder.name) / "read_bandwidth")
        subprocess.run([find_compiler(), *_FLAGS, str(SOURCE), "-o", self._program], check=True)

    def __enter__(self) -> Bandwidth:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._folder.cleanup()

    def sample(self) -> None:
        """One more sample (the best of fifteen reads, about half a second)."""
        done = subprocess.run([self._program, str(self._threads)], capture_output=True, text=True, check=True)
        self.samples.append(float(done.stdout))

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def report(self) -> dict[str, float]:
        return {
            "samples": len(self.samples),
            "min": min(self.samples),
            "median": self.median,
            "max": max(self.samples),
        }


def bracket(run_ours: Callable[[], float], run_peer: Callable[[], dict[str, Any]], rate: str) -> dict[str, Any]:
    """A peer's entry with our rates right before and after it, and their mean over the peer's ``rate``."""
    before = run_ours()
    entry = run_peer()
    after = run_ours()
    entry["ours_before_and_after"] = [round(before, 2), round(after, 2)]
    if entry.get(rate):
        entry["ours_over_peer"] = round((before + after) / 2 / float(entry[rate]), 3)
    return entry

"""Measured costs of LLM steps by their rows: what one more tree node costs on this machine."""

from __future__ import annotations

import statistics
import time

from flexspec.runtime.drafters.budget import StepCost
from flexspec.runtime.executors.pages import RowGroup, pack_rows
from flexspec.runtime.executors.step import Executor
from flexspec.types import PAGE_TOKENS


def measure_steps(executor: Executor, max_nodes: int, repeats: int = 3) -> tuple[StepCost, float]:
    """Time LLM steps of 1 row and of trees up to ``max_nodes`` at a short context; medians, in relative costs.

    Returns the cost table and the seconds of a one-row step. Uses the pool's first pages before any request owns them.
    """
    sizes = sorted({1, *(n for n in (4, 8, 12, 16, 24, 32, 48, 64) if n <= max_nodes + 1), max_nodes + 1})
    sizes = [n for n in sizes if n <= executor.max_rows]
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for _ in range(repeats):
        for n in sizes:  # interleaved, so that slow moments affect all sizes alike
            bits = [1 | 1 << i for i in range(n)] if n > 1 else None
            pages = list(range(min(executor.pages, 1 + (n + PAGE_TOKENS) // PAGE_TOKENS)))
            group = RowGroup([1] * n, [1] * n if n > 1 else [0], 0, pages, range(n), bits)
            batch = pack_rows([group])
            began = time.perf_counter()
            executor.step(batch, want_logits=False)
            times[n].append(time.perf_counter() - began)
    medians = [(n, statistics.median(values)) for n, values in times.items()]
    return StepCost.from_points(medians), medians[0][1]

"""Measures this machine for the planner: steps of an artifact's LLM with all ranks busy, and links of processes."""

from __future__ import annotations

import datetime
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from flexspec.compiler.artifact import open_artifact
from flexspec.compiler.fit_machine import StepFit, fit_device, fit_link, graph_calls
from flexspec.compiler.machine import Machine, open_machine
from flexspec.runtime.link_probe import probe_links
from flexspec.runtime.open_engine import ServeOptions, open_engine
from flexspec.runtime.pages import RowGroup, pack_rows
from flexspec.runtime.step import Executor, StepBatch
from flexspec.text import parse_graph
from flexspec.types import PAGE_TOKENS, DType, Role

TEMPLATE = "cpu2"  # the shipped file whose datasheet values are kept
_ROWS = (1, 2, 4, 8, 16, 32, 48, 64)
_REPEATS = 9
MAX_BUSY = 8  # each busy rank holds the weights once
_CONTEXT_TOKENS = 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """The machine as fitted, and how well the fit describes the measured steps."""

    machine: Machine
    steps: StepFit


def calibrate(path: Path, name: str, *, ranks: int, links: bool) -> Calibration:
    """Fit the shipped CPU machine to this one, of ``ranks`` devices (a core each). Raises what open_engine raises."""
    template = open_machine(TEMPLATE)
    kind = template.kinds[0]
    graph = parse_graph(open_artifact(path).read_bytes("graph/llm.fsg").decode("utf-8", "replace"))
    dtype = next(value.type.dtype for value in graph.inputs if value.type.role is Role.WEIGHT)
    busy = min(ranks, os.cpu_count() or 1, MAX_BUSY)
    today = datetime.date.today().isoformat()
    origin = f"fit {today} by flexspec calibrate on {path.name}, {dtype.value}, one thread each of {busy} busy ranks"
    with ExitStack() as opened:
        served = [open_engine(path, ServeOptions(draft="off", threads=1, measure=False)) for _ in range(busy)]
        for each in served:
            opened.callback(each.close)
        times = time_steps([each.executors[0] for each in served])
    steps = fit_device(kind.device, DType(dtype), graph_calls(graph), times, _CONTEXT_TOKENS, origin)
    link = kind.link
    if links and ranks > 1:
        transfers, reduces = probe_links(ranks)
        source = f"measured {today} by flexspec calibrate, gloo, {ranks} processes"
        link = fit_link(link.name, transfers, reduces, ranks, source)
    fitted = type(kind)(steps.device, ranks, link, 1)
    about = f"This machine, {ranks} of {os.cpu_count()} cores, one rank a core; calibrated."
    return Calibration(Machine(name, about, (fitted,), None, template.round_us, template.request_us), steps)


def time_steps(executors: Sequence[Executor]) -> dict[int, float]:
    """Rows -> median microseconds of a chain step of one request on the first executor, while the others run the same.

    All ranks of a plan share the memory's bandwidth, so a step alone would look too fast. Sizes are interleaved, so
    that all of them meet the slow moments of the machine.
    """
    sizes = [rows for rows in _ROWS if rows <= executors[0].max_rows]
    times: dict[int, list[float]] = {rows: [] for rows in sizes}
    batches = {rows: _chain(rows) for rows in sizes}
    for repeat in range(_REPEATS + 1):
        for rows in sizes:
            with _running(executors[1:], batches[rows]):
                executors[0].step(batches[rows], want_logits=False)  # the first step warms caches
                began = time.perf_counter()
                executors[0].step(batches[rows], want_logits=False)
                if repeat:
                    times[rows].append((time.perf_counter() - began) * 1e6)
    return {rows: statistics.median(values) for rows, values in times.items()}


def _chain(rows: int) -> StepBatch:
    pages = list(range(-(-(_CONTEXT_TOKENS + rows) // PAGE_TOKENS)))
    bits = [(1 << (i + 1)) - 1 for i in range(rows)] if rows > 1 else None
    positions = list(range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + rows))
    return pack_rows([RowGroup([1] * rows, positions, _CONTEXT_TOKENS, pages, range(rows), bits)])


@contextmanager
def _running(executors: Sequence[Executor], batch: StepBatch) -> Iterator[None]:
    """Steps of the same batch on the other executors, each in a thread (a step holds no lock of Python's)."""
    stop = threading.Event()

    def run(executor: Executor) -> None:
        while not stop.is_set():
            executor.step(batch, want_logits=False)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in executors]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        stop.set()
        for each in threads:
            each.join()

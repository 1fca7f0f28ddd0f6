"""Measures this machine for the planner: steps of an artifact's LLM with all ranks busy, and links of processes."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexspec.arithmetic import ceil_div
from flexspec.compiler.artifact.model_record import LLM
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.compiler.prices.fit_machine import MeasuredSteps, StepFit, fit_device, fit_link, fit_operator, graph_calls
from flexspec.compiler.prices.machine import (
    DEVICE_KEYS,
    PROCESSORS,
    Constant,
    Device,
    Link,
    Machine,
    Peaks,
    open_machine,
)
from flexspec.errors import MachineError
from flexspec.graph import Graph
from flexspec.host.cores import usable_cores
from flexspec.runtime.executors.cpu import CpuExecutor
from flexspec.runtime.executors.pages import RowGroup, pack_rows
from flexspec.runtime.executors.step import Executor, StepBatch
from flexspec.runtime.executors.step_times import Clock, StepTimes, lower_quartile
from flexspec.runtime.measure.host_probe import HostTimes, probe_host
from flexspec.runtime.measure.link_probe import probe_links
from flexspec.runtime.open.engine import open_artifact_engine
from flexspec.runtime.open.host_memory import HostMemory, host_memory
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.types import PAGE_TOKENS, DType, Role

TEMPLATE = "cpu2"  # the shipped file whose datasheet values are kept
_FOR_RANKS = 0.8  # of the memory; the rest is for the system: an estimate
_ROWS = (1, 2, 4, 8, 16, 32, 48, 64)
_REPEATS = 9
MAX_BUSY = 8  # each busy rank holds a copy of the weights
_CONTEXT_TOKENS = 1
_NODE_CONTEXT, _NODE_ROWS = 512, (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class FittedMachine:
    """The machine as fitted, and how well the fit describes the measured steps."""

    machine: Machine
    steps: StepFit
    tables_origin: str  # where the measured tables of its link come from


def calibrate(path: Path, name: str, *, ranks: int, links: bool) -> FittedMachine:
    """Fit the shipped CPU machine to this one, with ``ranks`` devices (one core each).

    Raises what open_engine raises, and MachineError if a rank's share of the memory is less than its reserve.
    """
    template = open_machine(TEMPLATE)
    kind = template.kinds[0]
    artifact = OpenedArtifact.at(path)
    graph = artifact.graph(LLM)
    dtype = next(value.type.dtype for value in graph.inputs if value.type.role is Role.WEIGHT)
    busy = min(ranks, usable_cores(), MAX_BUSY)
    today = datetime.date.today().isoformat()
    memory = memory_share(kind.device.memory_bytes, kind.device.reserve_bytes, ranks, host_memory(), today)
    origin = f"fit {today} by flexspec calibrate on {path.name}, {dtype.value}, one thread each of {busy} busy ranks"
    fitted_peak = f"correction: {origin}; value: {TEMPLATE}'s peak, kept"
    with ExitStack() as opened:
        served = [
            open_artifact_engine(artifact, ServeOptions(draft="off", threads=1, measure=False)) for _ in range(busy)
        ]
        for engine in served:
            opened.callback(engine.close)
        executors = [engine.executors[0] for engine in served]
        times = time_steps(executors)
        context = min(_NODE_CONTEXT, executors[0].max_positions - max(_NODE_ROWS))
        first = executors[0]
        assert isinstance(first, CpuExecutor)
        nodes = time_nodes(first, executors[1:], graph, context)
    launch = Constant(float(f"{shortest_us(nodes[1]):.4g}"), 1.0, f"the shortest operator of a row; {origin}")
    start = replace(shipped_device(kind.device), memory_bytes=memory, launch_us=launch, processor=PROCESSORS["cpu"])
    steps = fit_device(start, MeasuredSteps(dtype, graph_calls(graph), _CONTEXT_TOKENS, times), fitted_peak)
    device = fit_attention(steps.device, dtype, graph, nodes, context, fitted_peak)
    link, tables_origin = shipped_link(kind.link), f"kept from {TEMPLATE}, not measured here"
    if links and ranks > 1:
        transfers, reduces = probe_links(ranks)
        source = f"measured {today} by flexspec calibrate, gloo, {ranks} processes"
        link, tables_origin = fit_link(link.name, transfers, reduces, ranks, source), source
    fitted = type(kind)(device, ranks, link, 1)
    about = f"This machine, {ranks} of {usable_cores()} cores, one rank per core; calibrated."
    host = _host(template, probe_host(path), f"measured {today} by flexspec calibrate on {path.name}")
    return FittedMachine(replace(host, name=name, about=about, kinds=(fitted,), network=None), steps, tables_origin)


def memory_share(shipped: Constant, reserve: Constant, ranks: int, host: HostMemory | None, today: str) -> Constant:
    """Bytes of one of ``ranks`` equal shares of this host's memory; the shipped value if the kernel does not report it.

    Raises MachineError for less than the reserve: planner and reader of the file would refuse it.
    """
    if host is None:
        return as_shipped(shipped)
    origin = (
        f"value: memory of this host or its container, read {today} by flexspec calibrate; correction: "
        f"{_FOR_RANKS:g} of it over {ranks} rank{'s' if ranks > 1 else ''}, the rest for the system (estimate)"
    )
    share = Constant(float(host.total_bytes), float(f"{_FOR_RANKS / ranks:.4g}"), origin)
    if share.effective <= reserve.effective:
        raise MachineError(
            f"{share.effective / 1e9:.2f} GB of memory for each of {ranks} ranks",
            f"more than the {reserve.effective / 1e9:.2f} GB that a rank needs besides its weights",
            "choose fewer --ranks",
        )
    return share


def as_shipped(constant: Constant) -> Constant:
    """A constant of the shipped file, with an origin that says so."""
    return replace(constant, origin=f"kept from {TEMPLATE}, not measured here: {constant.origin}")


def shipped_device(device: Device) -> Device:
    """The shipped device, with origins that say so."""
    constants = {key: as_shipped(getattr(device, key)) for key in DEVICE_KEYS}
    operators = {
        name: Peaks(as_shipped(peaks.bandwidth_bytes_per_s), as_shipped(peaks.flops_per_s))
        for name, peaks in device.operators.items()
    }
    return replace(device, operators=operators, **constants)  # type: ignore[arg-type]


def shipped_link(link: Link) -> Link:
    """The shipped link, likewise."""
    alpha_us, bandwidth = as_shipped(link.alpha_us), as_shipped(link.bandwidth_bytes_per_s)
    width = as_shipped(link.element_bytes) if link.element_bytes else None
    return replace(link, alpha_us=alpha_us, bandwidth_bytes_per_s=bandwidth, element_bytes=width)


def _host(template: Machine, measured: HostTimes, origin: str) -> Machine:
    """The template with the host's constants as measured."""

    def constant(us: float) -> Constant:
        return Constant(float(f"{us:.4g}"), 1.0, origin)

    step_request = template.step_request_us
    return replace(
        template,
        round_us=constant(measured.round_us),
        request_us=constant(measured.request_us),
        step_us=constant(measured.step_us),
        step_request_us=as_shipped(step_request)
        if measured.step_request_us is None
        else constant(measured.step_request_us),
    )


class TimedExecutor(Executor, Protocol):
    """An executor that records when the nodes of its steps begin and end."""

    def keep_times(self, nodes: int) -> StepTimes: ...


def time_nodes(
    first: TimedExecutor, others: Sequence[Executor], graph: Graph, context_tokens: int
) -> dict[int, NDArray[np.float64]]:
    """Rows -> microseconds of each node of a step, 0 for one without code, while the other executors run it too."""
    times = first.keep_times(len(graph.nodes))
    nodes_us: dict[int, NDArray[np.float64]] = {}
    for rows in [rows for rows in _NODE_ROWS if rows <= first.max_rows]:
        batch = _chain(rows, context_tokens)
        with _running(others, batch):
            for _ in range(_REPEATS):
                first.step(batch, want_logits=False)
        took_us = np.diff(times.arrays()["stamps"][-_REPEATS + 1 :], axis=1) / 1e3
        nodes_us[rows] = np.percentile(took_us, 25, axis=0)
    return nodes_us


def shortest_us(nodes_us: NDArray[np.float64]) -> float:
    """The time of an operator that has almost nothing to do."""
    return float(nodes_us[nodes_us > 0].min())


def fit_attention(
    device: Device,
    dtype: DType,
    graph: Graph,
    nodes_us: Mapping[int, NDArray[np.float64]],
    context_tokens: int,
    origin: str,
) -> Device:
    """``device`` with peaks for attention, whose loops over pages are far from what a matrix product reaches."""
    calls = [call for call in graph_calls(graph) if any(kind.role is Role.KV for kind in call.inputs)]
    caches = {value.name for value in graph.inputs_of(Role.KV)}
    places = [i for i, node in enumerate(graph.nodes) if caches & set(node.inputs)]
    measured_us = {rows: float(took_us[places].sum()) for rows, took_us in nodes_us.items()}
    steps = MeasuredSteps(dtype, calls, context_tokens, measured_us)
    return fit_operator(device, steps, origin) if calls else device


def time_steps(executors: Sequence[Executor], clock: Clock = time.perf_counter) -> dict[int, float]:
    """Rows -> microseconds of a chain step of one request on the first executor, while the others run the same.

    All ranks of a plan share the memory's bandwidth, so a step alone would look too fast. Sizes are interleaved, so
    that the machine's slow moments affect all of them. ``clock`` returns seconds.
    """
    sizes = [rows for rows in _ROWS if rows <= executors[0].max_rows]
    times: dict[int, list[float]] = {rows: [] for rows in sizes}
    batches = {rows: _chain(rows) for rows in sizes}
    for repeat in range(_REPEATS + 1):
        for rows in sizes:
            with _running(executors[1:], batches[rows]):
                executors[0].step(batches[rows], want_logits=False)  # the first step warms caches
                began = clock()
                executors[0].step(batches[rows], want_logits=False)
                if repeat:
                    times[rows].append((clock() - began) * 1e6)
    return {rows: lower_quartile(values) for rows, values in times.items()}


def _chain(rows: int, context_tokens: int = _CONTEXT_TOKENS) -> StepBatch:
    pages = list(range(ceil_div(context_tokens + rows, PAGE_TOKENS)))
    bits = [(1 << (i + 1)) - 1 for i in range(rows)] if rows > 1 else None
    positions = list(range(context_tokens, context_tokens + rows))
    return pack_rows([RowGroup([1] * rows, positions, context_tokens, pages, range(rows), bits)])


@contextmanager
def _running(executors: Sequence[Executor], batch: StepBatch) -> Iterator[None]:
    """Run steps of the same batch on the other executors, each in a thread (a step releases Python's lock)."""
    stop = threading.Event()

    def run(executor: Executor) -> None:
        while not stop.is_set():
            executor.step(batch, want_logits=False)

    threads = [threading.Thread(target=run, args=(executor,), daemon=True) for executor in executors]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()

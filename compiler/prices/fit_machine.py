"""Fits a machine's constants to measured times: model steps on one device, and transfers over one link."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flexspec.compiler.prices.cost import all_reduce_us, op_us
from flexspec.compiler.prices.machine import Constant, Device, Link, Peaks
from flexspec.compiler.prices.profile import Call, step_sizes
from flexspec.graph import Graph
from flexspec.ops.record import record_of
from flexspec.types import DType

_MEMORY_ROWS = 4  # steps of at most this many rows are bound by reading weights
_COMPUTE_ROWS = 16  # steps of at least this many rows are bound by arithmetic
_MIN_CORRECTION, _MAX_CORRECTION = 1e-3, 4.0


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Steps of one request, measured on a device."""

    dtype: DType
    calls: Sequence[Call]  # the operators that ran in each of them
    context_tokens: int
    times_us: Mapping[int, float]  # by the step's rows

    def predict(self, device: Device) -> dict[int, float]:
        """Predicted microseconds of the same steps on ``device``, by rows."""
        return {rows: step_us(device, self.dtype, self.calls, rows, self.context_tokens) for rows in self.times_us}


@dataclass(frozen=True, slots=True)
class StepFit:
    """How well a fitted device predicts the steps that it was fitted to."""

    device: Device
    rows: tuple[tuple[int, float, float], ...]  # (rows, predicted us, measured us) of every step size

    @property
    def worst_ratio(self) -> float:
        """The largest factor between predicted and measured."""
        return max(max(p / m, m / p) for _, p, m in self.rows)


def graph_calls(graph: Graph) -> tuple[Call, ...]:
    """The operators of a graph, for pricing."""
    types = graph.types()
    return tuple(
        Call(
            record_of(node),
            tuple(types[name] for name in node.inputs),
            tuple(value.type for value in node.outputs),
            dict(node.attrs),
        )
        for node in graph.nodes
    )


def step_us(device: Device, dtype: DType, calls: Sequence[Call], rows: int, context_tokens: int) -> float:
    """Predicted time of a step of one request."""
    sizes = step_sizes(rows, 1, context_tokens)
    return sum(op_us(device, dtype, call, sizes) for call in calls)


def fit_device(device: Device, steps: MeasuredSteps, origin: str) -> StepFit:
    """``device`` with the corrections of bandwidth and arithmetic that best fit the measured steps."""
    fitted = _fit_peaks(device, None, steps, origin)
    rows = tuple((rows, us, steps.times_us[rows]) for rows, us in sorted(steps.predict(fitted).items()))
    return StepFit(fitted, rows)


def fit_operator(device: Device, steps: MeasuredSteps, origin: str) -> Device:
    """``device`` with separate peaks for the one operator that ``steps`` consist of."""
    (operator,) = {call.record.name for call in steps.calls}
    return _fit_peaks(device, operator, steps, origin)


def _fit_peaks(device: Device, operator: str | None, steps: MeasuredSteps, origin: str) -> Device:
    """``device`` with fitted peaks of an operator, or of all operators without separate peaks (None).

    Bandwidth is fitted to the narrow steps and arithmetic to the wide ones, in turn, by least squares of
    log(predicted / measured).
    """
    measured_us = steps.times_us
    narrow = [rows for rows in measured_us if rows <= _MEMORY_ROWS] or [min(measured_us)]
    wide = [rows for rows in measured_us if rows >= _COMPUTE_ROWS] or [max(measured_us)]

    def error(peaks: Peaks, sizes: Sequence[int]) -> float:
        predicted_us = steps.predict(device.with_peaks(steps.dtype, operator, peaks))
        return sum(math.log(predicted_us[rows] / measured_us[rows]) ** 2 for rows in sizes)

    peaks = device.peaks(steps.dtype, operator)
    for _ in range(3):
        for name, sizes in (("bandwidth_bytes_per_s", narrow), ("flops_per_s", wide)):
            value = getattr(peaks, name).value
            corrected = [
                replace(peaks, **{name: Constant(value, correction, origin)})
                for correction in _grid(_MIN_CORRECTION, _MAX_CORRECTION, 120)
            ]
            errors = [error(candidate, sizes) for candidate in corrected]
            peaks = corrected[errors.index(min(errors))]
    return device.with_peaks(steps.dtype, operator, peaks)


def _grid(least: float, most: float, count: int) -> list[float]:
    """A geometric sequence, rounded to four digits for the machine file."""
    return [float(f"{least * (most / least) ** (i / (count - 1)):.4g}") for i in range(count)]


def fit_link(
    name: str, transfers_us: Mapping[int, float], reduces_us: Mapping[int, float], ranks: int, origin: str
) -> Link:
    """A link fitted to the times of transfers and all-reduces, both by bytes.

    Its latency is the fastest transfer's time; its bandwidth follows from the extra time of the largest transfer.
    All-reduces get a measured table, since a library's collectives start more slowly than its transfers.
    """
    sizes = sorted(transfers_us)
    alpha_us = min(transfers_us.values())
    rest_us = max(transfers_us[sizes[-1]] - alpha_us, 1e-3 * alpha_us)
    link = Link(
        name,
        Constant(float(f"{alpha_us:.4g}"), 1.0, origin),
        Constant(float(f"{sizes[-1] / rest_us * 1e6:.4g}"), 1.0, origin),
        element_bytes=Constant(float(DType.F32.size_bytes), 1.0, "rows travel as float32 (docs/design/distributed.md)"),
    )
    points: list[tuple[float, float]] = []
    for size in sorted(reduces_us):
        ideal_us = all_reduce_us(link, size, ranks)
        if not points or ideal_us > points[-1][0] * 1.01:
            floor_us = points[-1][1] if points else 0.0
            points.append((float(f"{ideal_us:.4g}"), max(floor_us, float(f"{reduces_us[size]:.4g}"))))
    if len(points) < 2:
        return link
    # The runtime sums by a gather and additions in rank order: one table serves both.
    return replace(link, measured={"all_reduce": tuple(points), "all_gather": tuple(points)})

"""Fits a machine's constants to measured times: steps of a whole model on one device, and transfers over one link."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from flexspec.compiler.prices.cost import all_reduce_us, op_us
from flexspec.compiler.prices.machine import Constant, Device, Link, Peaks
from flexspec.compiler.prices.profile import Call, step_sizes
from flexspec.graph import Graph
from flexspec.ops.record import record_of
from flexspec.types import DType

_MEMORY_ROWS, _COMPUTE_ROWS = 4, 16  # steps up to the first are bound by reading weights, from the second by arithmetic
_LEAST, _MOST = 1e-3, 4.0  # range of a correction


@dataclass(frozen=True, slots=True)
class StepFit:
    """The fitted device, and (rows, predicted us, measured us) of every step size."""

    device: Device
    rows: tuple[tuple[int, float, float], ...]

    @property
    def worst_ratio(self) -> float:
        """The largest factor between predicted and measured."""
        return max(max(p / m, m / p) for _, p, m in self.rows)


def graph_calls(graph: Graph) -> tuple[Call, ...]:
    """The operators of a graph, to be priced."""
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


def fit_device(
    device: Device,
    dtype: DType,
    calls: Sequence[Call],
    measured_us: Mapping[int, float],
    context_tokens: int,
    origin: str,
) -> StepFit:
    """``device`` with corrections of bandwidth and arithmetic that suit the measured steps (rows -> us) best.

    The two are fitted in turn, each to the steps that it bounds, by least squares of the logarithm of the ratio.
    """
    key = "f32_flops_per_s" if dtype is DType.F32 else "flops_per_s"

    def changed(peaks: Peaks) -> Device:
        return replace(
            device,
            **{"bandwidth_bytes_per_s": peaks.bandwidth_bytes_per_s, key: peaks.flops_per_s},  # type: ignore[arg-type]
        )

    load = _Load(dtype, calls, context_tokens, measured_us)
    fitted = changed(_fit_peaks(device.peaks(dtype, ""), changed, load, origin))
    rows = tuple((n, us, measured_us[n]) for n, us in sorted(load.times(fitted).items()))
    return StepFit(fitted, rows)


def fit_operator(
    device: Device,
    dtype: DType,
    calls: Sequence[Call],
    measured_us: Mapping[int, float],
    context_tokens: int,
    origin: str,
) -> Device:
    """``device`` with peaks of their own for the operator of ``calls``, which took ``measured_us`` (rows -> us)."""
    (name,) = {call.record.name for call in calls}

    def changed(peaks: Peaks) -> Device:
        return replace(device, operators={**device.operators, name: peaks})

    load = _Load(dtype, calls, context_tokens, measured_us)
    return changed(_fit_peaks(device.peaks(dtype, name), changed, load, origin))


@dataclass(frozen=True, slots=True)
class _Load:
    """Steps that were measured: what ran in them, and rows -> us."""

    dtype: DType
    calls: Sequence[Call]
    context_tokens: int
    measured_us: Mapping[int, float]

    def times(self, device: Device) -> dict[int, float]:
        """The same steps as ``device`` prices them."""
        return {rows: step_us(device, self.dtype, self.calls, rows, self.context_tokens) for rows in self.measured_us}


def _fit_peaks(peaks: Peaks, changed: Callable[[Peaks], Device], load: _Load, origin: str) -> Peaks:
    """Corrections of both peaks of the device that ``changed`` makes: bandwidth by the narrow steps, arithmetic by the
    wide ones, in turn."""
    measured_us = load.measured_us
    few = [rows for rows in measured_us if rows <= _MEMORY_ROWS] or [min(measured_us)]
    many = [rows for rows in measured_us if rows >= _COMPUTE_ROWS] or [max(measured_us)]

    def error(candidate: Peaks, sizes: Sequence[int]) -> float:
        found = load.times(changed(candidate))
        return sum(math.log(found[rows] / measured_us[rows]) ** 2 for rows in sizes)

    for _ in range(3):
        for name, sizes in (("bandwidth_bytes_per_s", few), ("flops_per_s", many)):
            held: Constant = getattr(peaks, name)
            tried = [
                replace(peaks, **{name: Constant(held.value, correction, origin)})
                for correction in _grid(_LEAST, _MOST, 120)
            ]
            peaks = min(tried, key=lambda each: error(each, sizes))
    return peaks


def _grid(least: float, most: float, count: int) -> list[float]:
    """Numbers in equal ratios, rounded to what a file should hold."""
    return [float(f"{least * (most / least) ** (i / (count - 1)):.4g}") for i in range(count)]


def fit_link(
    name: str, transfers_us: Mapping[int, float], reduces_us: Mapping[int, float], ranks: int, origin: str
) -> Link:
    """A link from times of transfers and of all-reduces by bytes.

    The start is the smallest transfer's time and the bandwidth what the largest takes beyond it; all-reduces get a
    table over what those two predict, since a library's collectives start slower than its transfers.
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
        ideal, found = all_reduce_us(link, size, ranks), reduces_us[size]
        if not points or ideal > points[-1][0] * 1.01:
            floor = points[-1][1] if points else 0.0
            points.append((float(f"{ideal:.4g}"), max(floor, float(f"{found:.4g}"))))
    if len(points) < 2:
        return link
    # The runtime's sum is a gather and an addition in order: one table serves both.
    return replace(link, measured={"all_reduce": tuple(points), "all_gather": tuple(points)})

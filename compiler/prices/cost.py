"""Times in microseconds of operators, collectives, hops and units of a model, from a machine's constants.

An operator takes max(flops / peak, bytes / bandwidth) + launch; a measured table of the device overrides the maximum.
Collectives follow the alpha-beta model, with the best of one-shot, ring and tree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from flexspec.arithmetic import ceil_div
from flexspec.compiler.prices.machine import Device, Link, Points
from flexspec.compiler.prices.profile import Call, Sizes
from flexspec.ops.record import Collective
from flexspec.types import DType


def op_us(device: Device, dtype: DType, call: Call, sizes: Sizes) -> float:
    """One operator on one device. Views move nothing and take no time."""
    flops, moved_bytes = call.flops(sizes), call.bytes(sizes)
    if not flops and not moved_bytes:
        return 0.0
    peaks = device.peaks(dtype, call.record.name)
    peak, bandwidth = peaks.flops_per_s, peaks.bandwidth_bytes_per_s
    points = device.measured.get(call.record.name)
    if points:
        ideal_us = max(flops / peak.value, moved_bytes / bandwidth.value) * 1e6
        return interpolate(points, ideal_us) + device.launch_us.effective
    return max(flops / peak.effective, moved_bytes / bandwidth.effective) * 1e6 + device.launch_us.effective


def interpolate(points: Points, ideal_us: float) -> float:
    """The measured time for an ideal time: linear between points, constant below and proportional above them."""
    if ideal_us <= points[0][0]:
        return points[0][1]  # less work is no faster than the smallest measured
    if ideal_us >= points[-1][0]:
        return points[-1][1] * ideal_us / points[-1][0]
    i = bisect_right(points, (ideal_us, float("inf")))
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (ideal_us - x0) / (x1 - x0)


def all_reduce_us(link: Link, count_bytes: float, degree: int) -> float:
    """Sum of ``count_bytes`` from each of ``degree`` ranks, on all of them: the best of one-shot, ring and tree."""
    alpha, per_byte = link.alpha_us.effective, 1e6 / link.bandwidth_bytes_per_s.effective
    levels = (degree - 1).bit_length()
    one_shot = alpha + (degree - 1) * count_bytes * per_byte
    ring = 2 * (degree - 1) * (alpha + count_bytes / degree * per_byte)
    tree = 2 * levels * (alpha + count_bytes * per_byte)
    return _collective_us(link, "all_reduce", degree, min(one_shot, ring, tree))


def all_gather_us(link: Link, count_bytes: float, degree: int) -> float:
    """Shares of ``degree`` ranks, gathered into ``count_bytes`` on all of them: the better of one-shot and ring."""
    alpha, per_byte = link.alpha_us.effective, 1e6 / link.bandwidth_bytes_per_s.effective
    received = (degree - 1) / degree * count_bytes * per_byte
    return _collective_us(link, "all_gather", degree, min(alpha + received, (degree - 1) * alpha + received))


def _collective_us(link: Link, name: str, degree: int, ideal_us: float) -> float:
    """Zero on one rank; a measured table of the link overrides the formula."""
    if degree == 1:
        return 0.0
    points = link.measured.get(name)
    return interpolate(points, ideal_us) if points else ideal_us


def broadcast_us(link: Link, count_bytes: float, ranks: int) -> float:
    """From one rank to ``ranks`` - 1 others, along a tree."""
    return (ranks - 1).bit_length() * link.transfer_us(count_bytes) if ranks > 1 else 0.0


def hop_us(between: Link, inside: Link, count_bytes: float, source: int, target: int, *, shared: bool) -> float:
    """Activations from a stage of ``source`` ranks to one of ``target`` ranks, as the partition pass sends them.

    min(source, target) copies are sent: in parallel if every device has a link, in turn if the devices of a node share
    one (``shared``). Extra ranks of the target receive from a peer.
    """
    copies = min(source, target) if shared else 1
    return between.transfer_us(copies * count_bytes) + broadcast_us(inside, count_bytes, ceil_div(target, source))


def call_us(device: Device, link: Link, dtype: DType, call: Call, sizes: Sizes, degree: int) -> float:
    """An operator or a collective."""
    collective = call.record.collective
    if collective is Collective.ALL_REDUCE:
        return all_reduce_us(link, link.sent_bytes(call.inputs[0].bytes(sizes), dtype), degree)
    if collective is Collective.ALL_GATHER:
        result = call.outputs[0]
        if call.joins_logits and device.processor.joins_best_alone:
            result = replace(result, dims=(result.dims[0], 2 * degree))
        return all_gather_us(link, link.sent_bytes(result.bytes(sizes), dtype), degree)
    assert collective is None, f"{call.record.name} inside a stage has no price"
    return op_us(device, dtype, call, sizes)


def call_times(
    device: Device, link: Link, dtype: DType, calls: Sequence[Call], sizes: Sizes, degree: int
) -> Iterator[tuple[Call, float]]:
    """Every operator and collective of a unit, with its time in microseconds."""
    for call in calls:
        yield call, call_us(device, link, dtype, call, sizes, degree)


def unit_us(device: Device, link: Link, dtype: DType, calls: Sequence[Call], sizes: Sizes, degree: int) -> float:
    """All operators of a unit, one after the other."""
    return sum(us for _, us in call_times(device, link, dtype, calls, sizes, degree))

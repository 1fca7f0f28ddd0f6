"""Stamps of ranks become lines of a round: made-up clocks, whose sums are known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from flexspec.runtime.measure.stamps import RankTimes, complete, quartile_mean, stage_lines, verify_lines


def rank(ops: str, call: tuple[float, float], stamps: list[float]) -> RankTimes:
    return RankTimes(tuple(ops.split()), np.array([call], np.float64), np.array([stamps], np.float64))


def numbers(lines: dict[object, NDArray[np.float64]]) -> dict[object, float]:
    return {key: float(values[0]) for key, values in lines.items()}


def test_a_pipeline_is_two_stages_and_a_hop() -> None:
    first = rank("embedding linear send", (0, 100), [2, 5, 50, 99])
    second = rank("recv linear linear", (10, 130), [11, 70, 100, 120])
    assert numbers(verify_lines([[first], [second]])) == {
        ("stage 0", "embedding"): 3, ("stage 0", "linear"): 45, ("stage 0", "hand over"): 2,
        ("hop 0-1", "all"): 20,  # from the first stage's last operator to the second's first
        ("stage 1", "linear"): 50, ("stage 1", "hand over"): 10,
    }  # fmt: skip


def test_ranks_of_a_stage_are_averaged_and_the_late_one_is_waited_for() -> None:
    early = rank("linear reduce linear", (0, 100), [2, 12, 50, 90])
    late = rank("linear reduce linear", (20, 100), [24, 40, 50, 92])
    lines, begin, end = stage_lines([early, late])
    assert (begin[0], end[0]) == (0, 100)
    assert numbers(lines) == {
        "linear": (10 + 16 + 40 + 42) / 2, "reduce": (38 + 10) / 2, "hand over": (2 + 4) / 2, "combine": (10 + 8) / 2,
        "wait for ranks": 10,
    }  # fmt: skip
    assert sum(numbers(lines).values()) == 100


def test_what_is_sent_on_the_way_belongs_to_the_stage() -> None:
    lines, _, end = stage_lines([rank("linear send linear send", (0, 90), [1, 11, 31, 61, 88])])
    assert numbers(lines) == {"linear": 40, "send": 20, "hand over": 1} and end[0] == 61


def test_a_part_is_completed_to_its_sum() -> None:
    lines = {("draft", "linear"): np.array([3.0, 4.0]), ("host", "all"): np.array([9.0, 9.0])}
    complete(lines, "draft", "between steps", np.array([5.0, 5.0]))
    assert lines["draft", "between steps"].tolist() == [2.0, 1.0]


def test_slow_rounds_stay_out_of_the_mean() -> None:
    lines = {("a", "x"): np.array([1.0, 2, 3, 1000, 4, 0, 5, 6]), ("b", "x"): np.full(8, 10.0)}
    found, count = quartile_mean(lines)
    assert count == 2 and found == {("a", "x"): pytest.approx(1.5), ("b", "x"): 10.0}
    assert quartile_mean({("a", "x"): np.array([7.0])}) == ({("a", "x"): 7.0}, 1)

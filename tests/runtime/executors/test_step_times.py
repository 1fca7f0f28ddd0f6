"""What a program's steps took, kept step by step: stamps that are copied, and nodes without code."""

from __future__ import annotations

import numpy as np
import pytest

from flexspec.runtime.executors.step_times import StepTimes, lower_quartile


def test_stamps_are_kept_step_by_step() -> None:
    stamps = np.zeros(4, np.int64)  # the program's own, overwritten by each step
    times = StepTimes(_stamps=stamps)
    stamps[:] = [10, 20, 0, 45]  # the second node has no code
    times.note(8, 50)
    stamps[:] = [110, 0, 0, 130]
    times.note(105, 140)
    arrays = times.arrays()
    assert arrays["calls"].tolist() == [[8, 50], [105, 140]]
    assert arrays["stamps"].tolist() == [[10, 20, 20, 45], [110, 110, 110, 130]]


def test_no_step_is_an_empty_record() -> None:
    arrays = StepTimes(_stamps=np.zeros(3, np.int64)).arrays()
    assert arrays["calls"].shape == (0, 2) and arrays["stamps"].shape == (0, 3)


@pytest.mark.parametrize(
    ("values", "quartile"), [([4.0], 4.0), ([9.0, 1.0, 5.0, 3.0, 99.0], 3.0), ([10.0, 20.0, 30.0, 40.0], 17.5)]
)
def test_the_lower_quartile(values: list[float], quartile: float) -> None:
    assert lower_quartile(values) == quartile

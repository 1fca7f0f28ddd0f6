"""Rounds on a made-up clock, and what is asked of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from flexspec.runtime.executors.step_times import StepTimes
from flexspec.runtime.measure.round_runs import (
    MeasuredRound,
    RoundRequest,
    StepSeconds,
    TimedEngine,
    measured_round,
)


def test_a_round_is_one_step_of_the_engine() -> None:
    served: Any = None
    timed = TimedEngine(served, StepSeconds(), StepTimes(), [StepTimes(), StepTimes()])

    def ran(times: StepTimes) -> None:
        times.calls_ns.append((0, 1))
        times.stamps_ns.append(np.zeros(2, np.int64))

    def step() -> None:
        for times in (timed.ssms[0], timed.ssms[0], timed.ssms[1]):
            ran(times)
        timed.observer.record_step(0.002, "draft")
        timed.observer.record_step(0.001, "draft")
        ran(timed.llm)
        timed.observer.record_step(0.004, "verify")

    clock = itertools.count(100, 0.5)
    first, second = (measured_round(step, timed, lambda: next(clock)) for _ in range(2))
    assert first == MeasuredRound(500_000.0, 3_000.0, 4_000.0, 0, [(0, 2), (0, 1)])
    assert second == MeasuredRound(500_000.0, 3_000.0, 4_000.0, 1, [(2, 4), (1, 2)])


def test_a_request_for_rounds_knows_its_room() -> None:
    request = RoundRequest("tree:2,2,1/sources=ssm", 3, 100, rounds=10, warm=4)
    assert request.most_tokens == (4 + 10 + 16) * 4  # a round of depth 3 commits at most 4
    assert request.kv_tokens == 3 * (100 + 120 + 10 + 64)  # 2 + 4 + 4 nodes
    assert RoundRequest("off", 1, 100, 10, 4).most_tokens == 30

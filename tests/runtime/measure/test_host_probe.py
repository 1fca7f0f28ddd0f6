"""The host's constants: the line through samples, and real rounds of a tiny artifact."""

from __future__ import annotations

import itertools
from pathlib import Path

import artifacts
import numpy as np
import pytest

from flexspec.runtime.executors.step_times import StepTimes
from flexspec.runtime.measure.host_probe import HostSamples, line_fit, probe_host
from flexspec.runtime.measure.round_runs import MeasuredRound


def test_a_line_through_samples_never_falls_below_nothing() -> None:
    assert line_fit([(1, 30.0), (2, 40.0), (4, 60.0)]) == (pytest.approx(20), pytest.approx(10))
    assert line_fit([(1, 30.0), (2, 30.0), (4, 10.0)]) == (pytest.approx(70 / 3), 0.0)
    assert line_fit([(2, 5.0), (2, 7.0)]) == (pytest.approx(6), 0.0)
    assert line_fit([(1, 1.0), (2, 9.0)])[0] == 0.0


def step_times(*steps: tuple[float, float]) -> StepTimes:
    """Steps of (microseconds in the program, around it); each begins where the one before has ended."""
    times, now_ns = StepTimes(), 1_000
    for inside_us, around_us in steps:
        first = now_ns + int(around_us * 500)
        last = first + int(inside_us * 1e3)
        times.calls_ns.append((now_ns, now_ns + int((inside_us + around_us) * 1e3)))
        times.stamps_ns.append(np.array([first, (first + last) // 2, last]))
        now_ns = times.calls_ns[-1][1]
    return times


def made_up_samples(*, drafts: bool) -> HostSamples:
    """Rounds that take 40 us and 10 a request beside the programs; steps of 6 us, drafting ones 2 more a request."""
    samples = HostSamples()
    for batch in (1, 2, 4):
        drafting_us = 6 + 2 * batch
        llm = step_times((9999, 99), (800, 6), (900, 6))  # the first is a warm round's
        ssm = step_times((100, 6), (300, 6), (100, 6), (200, 6))
        rounds = []
        for step, (total_us, programs_us) in enumerate([(3000, 400), (4000, 300)], 1):
            draft_us = programs_us + 2 * drafting_us if drafts else 0.0
            verify_us = total_us - draft_us - (40 + 10 * batch)
            spans = [(2 * step - 2, 2 * step)] if drafts else []
            rounds.append(MeasuredRound(total_us, draft_us, verify_us, step, spans))
        samples.add(batch, rounds, llm, [ssm] if drafts else [])
    return samples


def test_made_up_rounds_give_the_constants_they_were_made_of() -> None:
    without = made_up_samples(drafts=False).fit()
    assert (without.round_us, without.request_us) == (pytest.approx(40), pytest.approx(10))
    assert (without.step_us, without.step_request_us) == (pytest.approx(6), None)
    with_ssm = made_up_samples(drafts=True).fit()
    assert (with_ssm.round_us, with_ssm.request_us) == (pytest.approx(40), pytest.approx(10))
    assert (with_ssm.step_us, with_ssm.step_request_us) == (pytest.approx(6), pytest.approx(2))


def test_two_ssms_share_the_time_of_drafting() -> None:
    samples = HostSamples()
    first, second = step_times((100, 1), (100, 1)), step_times((50, 1))
    rounds = [MeasuredRound(1000, 100 + 100 + 50 + 3 * 7, 400, 0, [(0, 2), (0, 1)])]
    samples.add(1, rounds, step_times((300, 5)), [first, second])
    assert samples.steps == [(0, pytest.approx(5)), (1, pytest.approx(7))]


@pytest.mark.parametrize("with_ssm", [True, False])
def test_rounds_of_an_artifact_are_measured(tmp_path: Path, with_ssm: bool) -> None:
    """On a clock that adds a second at each reading: a round is two readings, so a second less the steps' own times."""
    readings = itertools.count()
    measured = probe_host(
        artifacts.compile_tiny(tmp_path, with_ssm=with_ssm, draft="off"), clock=lambda: float(next(readings))
    )
    assert 8e5 < measured.round_us + measured.request_us < 1e6
    assert (measured.step_request_us is not None) == with_ssm

"""The host's constants: the line through samples, and real rounds of a tiny artifact."""

from __future__ import annotations

from pathlib import Path

import artifacts
import pytest

from flexspec.runtime.measure.host_probe import line_fit, probe_host


def test_a_line_through_samples_never_falls_below_nothing() -> None:
    assert line_fit([(1, 30.0), (2, 40.0), (4, 60.0)]) == (pytest.approx(20), pytest.approx(10))
    assert line_fit([(1, 30.0), (2, 30.0), (4, 10.0)]) == (pytest.approx(70 / 3), 0.0)
    assert line_fit([(2, 5.0), (2, 7.0)]) == (pytest.approx(6), 0.0)
    assert line_fit([(1, 1.0), (2, 9.0)])[0] == 0.0


@pytest.mark.parametrize("with_ssm", [True, False])
def test_rounds_of_an_artifact_are_measured(tmp_path: Path, with_ssm: bool) -> None:
    found = probe_host(artifacts.compile_tiny(tmp_path, with_ssm=with_ssm, draft="off"))
    assert found.round_us + found.request_us > 0 and found.step_us > 0
    assert (found.step_request_us is not None) == with_ssm

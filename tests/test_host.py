"""What the host lets the process use."""

from __future__ import annotations

import os

import pytest

from flexspec.host.cores import usable_cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
def test_only_cores_that_the_process_may_run_on_are_counted() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert usable_cores() == len(before)


def test_without_affinity_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1

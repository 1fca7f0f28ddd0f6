"""Which rank's end is told, with which exit code, and how often ranks are started again."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from flexspec.cli.serving import launch
from flexspec.runtime.distributed import launch as distributed_launch

GONE = "another rank is gone or silent (Connection closed by peer)"
KILL, TERM, CRASH = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV


@pytest.mark.parametrize(
    ("failed", "said", "ending"),
    [
        ({0: 1, 1: KILL, 2: TERM}, {0: GONE}, (1, "rank 1 ended (killed by SIGKILL)")),
        ({0: KILL, 1: 1}, {1: GONE}, (1, "rank 0 ended (killed by SIGKILL)")),
        ({0: TERM, 1: CRASH}, {}, (1, "rank 1 ended (killed by SIGSEGV)")),
        ({0: TERM, 1: 2}, {1: "FS401: no such file"}, (2, "rank 1: FS401: no such file")),
        ({0: 2, 1: CRASH}, {0: "FS502: too much"}, (2, "rank 0: FS502: too much")),
        ({0: 1, 1: 1, 2: 1}, {0: GONE, 1: GONE, 2: "KeyError"}, (1, "rank 2: KeyError")),
        ({0: 1, 1: 1}, {0: GONE, 1: GONE}, (1, f"rank 0: {GONE}")),
        ({1: 7}, {}, (1, "rank 1 ended (exit code 7)")),
    ],
)
def test_the_rank_is_named_that_the_others_followed(
    failed: Mapping[int, int], said: Mapping[int, str], ending: tuple[int, str]
) -> None:
    assert launch.judge(failed, said) == launch.Ending(*ending)


@pytest.mark.parametrize(
    ("failed", "code", "why"),
    [
        ({}, 0, ""),
        ({0: TERM, 1: TERM}, 143, ""),
        ({0: 130, 1: TERM}, 130, ""),
        ({1: KILL}, 1, "rank 1 ended (killed by SIGKILL)"),
        ({0: 1, 1: KILL}, 1, "rank 1 ended (killed by SIGKILL)"),
    ],
)
def test_after_a_signal_the_exit_code_is_rank_0s(failed: Mapping[int, int], code: int, why: str) -> None:
    assert launch.stopped(failed, {}) == launch.Ending(code, why)


def keep_running(
    monkeypatch: pytest.MonkeyPatch, words: Path, restarts: int, runs: list[tuple[float, Mapping[int, int]]]
) -> tuple[int, int]:
    """The exit code and the number of starts, for runs that last so long and fail so."""
    clock = [0.0]
    starts = [0]

    def run_ranks(*_: object) -> Mapping[int, int]:
        lasted, failed = runs[starts[0]]
        starts[0] += 1
        clock[0] += lasted
        (words / "0").write_text("FS999: said")
        return failed

    monkeypatch.setattr(distributed_launch, "run_ranks", run_ranks)
    monkeypatch.setattr(launch.time, "monotonic", lambda: clock[0])
    return launch._keep_running([], 2, restarts, words, [], []), starts[0]


def test_restarts_in_a_row_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    died = {1: KILL}
    assert keep_running(monkeypatch, tmp_path, 0, [(1, died)]) == (1, 1)
    assert capsys.readouterr().err == "flexspec serve: rank 1 ended (killed by SIGKILL)\n"
    assert keep_running(monkeypatch, tmp_path, 2, [(1, died)] * 9) == (1, 3)
    assert capsys.readouterr().err.splitlines() == [
        "flexspec serve: rank 1 ended (killed by SIGKILL); starting again (1 of 2)",
        "flexspec serve: rank 1 ended (killed by SIGKILL); starting again (2 of 2)",
        "flexspec serve: rank 1 ended (killed by SIGKILL); no restarts left of 2",
    ]
    assert keep_running(monkeypatch, tmp_path, 1, [(1, died), (3600, died), (1, died), (1, {})]) == (1, 3)
    assert keep_running(monkeypatch, tmp_path, 2, [(1, died), (3600, died), (1, died), (1, {})]) == (0, 4)


def test_a_user_error_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keep_running(monkeypatch, tmp_path, 5, [(1, {1: KILL}), (1, {0: 2, 1: TERM})]) == (2, 2)
    assert capsys.readouterr().err.splitlines()[-1] == "flexspec serve: rank 0: FS999: said"

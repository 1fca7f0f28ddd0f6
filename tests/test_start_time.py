"""Start-up cost: ``import flexspec`` and ``flexspec --help`` stay cheap. Processor time, so a busy machine is fine."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from repository import ROOT

LIMIT_S = 0.3


def processor_s(*arguments: str) -> float:
    """User and system time of one child process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("arguments", [("-c", "import flexspec"), ("-m", "flexspec", "--help")])
def test_start_is_cheap(arguments: tuple[str, ...]) -> None:
    assert min(processor_s(*arguments) for _ in range(3)) < LIMIT_S

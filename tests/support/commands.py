"""The real command line in subprocesses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

_TIMEOUT_S = 240.0  # for a machine that is busy with other things; nothing waits for it
_ADDRESS = re.compile(r"on (http://127\.0\.0\.1:\d+)")


def environment(**changes: str) -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "FLEXSPEC_DEBUG": "", **changes}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "flexspec", *map(str, arguments)]


def flexspec(*arguments: str | Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command(*arguments), cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=_TIMEOUT_S,
        check=False,
    )  # fmt: skip


@dataclass(slots=True)
class Server:
    process: subprocess.Popen[str]
    url: str

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and give the exit code."""
        self.process.send_signal(number)
        return self.process.wait(_TIMEOUT_S)


@contextmanager
def serving(*arguments: str | Path) -> Iterator[Server]:
    """``flexspec serve`` on a port of its own choice, once it is ready."""
    process = subprocess.Popen(
        command("serve", *arguments, "--port", "0"), env=environment(), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = []
    try:
        while (line := process.stderr.readline()) and not (found := _ADDRESS.search(line)):
            said.append(line)
        assert line and found, f"the server did not start: {said}"
        yield Server(process, found[1])
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()

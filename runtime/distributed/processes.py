"""Processes that are ranks: which rank this process is, and how to run a module as all ranks of this host.

``flexspec serve`` starts its ranks through torchrun's agent instead (distributed/launch.py), which watches and restarts
them for hours; those started here measure something and end. Both set torchrun's variables, which only
:func:`this_rank` reads. Imports no torch.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from flexspec.errors import CapacityError


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A process's place among the ranks."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0  # among those of this host
    local_ranks: int = 1
    launched: bool = False  # as a rank, even as the only one

    @property
    def on_this_host(self) -> range:
        """The ranks of this host."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_ranks)


def this_rank(environment: Mapping[str, str] = os.environ) -> RankPlace:
    """The place of this process, as torchrun set it. Raises CapacityError for a variable that is not a number."""

    def number(name: str, default: int) -> int:
        try:
            return int(environment.get(name, default))
        except ValueError:
            raise CapacityError(f"{name}={environment[name]!r}", "a number", "start it with torchrun") from None

    return RankPlace(
        number("RANK", 0), number("WORLD_SIZE", 1), number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", 1),
        "RANK" in environment,
    )  # fmt: skip


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """The environment of each rank, to connect over loopback on a port that is free now; one rank needs no port."""
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


class RanksFailed(Exception):
    """A rank failed, or did not end in time. The text is the last line that each rank wrote to stderr."""


class RankProcesses:
    """The running ranks. Rank 0 takes lines on stdin; ranks answer on stdout."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self._stderr: dict[int, str] = {}  # by process, of those that have ended

    def ask(self, line: str) -> str:
        """Send rank 0 a line and return the line that it answers. Raises RanksFailed when it has ended."""
        leader = self._processes[0]
        assert leader.stdin is not None and leader.stdout is not None
        try:
            leader.stdin.write(line + "\n")
            leader.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        answer = leader.stdout.readline()
        if not answer:
            raise self._failure()
        return answer

    def finish(self, within_s: float) -> list[str]:
        """Close rank 0's input, wait for all ranks, and return what each wrote to stdout and was not read yet.

        Raises RanksFailed when a rank fails, or is not done ``within_s`` seconds from now.
        """
        ends_at = time.monotonic() + within_s
        outputs = []
        for process in self._processes:
            try:
                output, self._stderr[process.pid] = process.communicate(timeout=max(0.0, ends_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise self._failure(f"not finished within {within_s:g} s") from None
            outputs.append(output)
        if any(process.returncode for process in self._processes):
            raise self._failure()
        return outputs

    def _failure(self, *reasons: str) -> RanksFailed:
        """Kill all ranks and say why they failed."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            if process.pid not in self._stderr:
                self._stderr[process.pid] = process.communicate()[1]
        failed_first = sorted(self._processes, key=lambda process: process.returncode <= 0)
        last_lines = [line for process in failed_first for line in self._stderr[process.pid].strip().splitlines()[-1:]]
        lines = dict.fromkeys([*reasons, *last_lines])  # ranks that fail alike write the same line
        return RanksFailed("; ".join(lines) or "a rank ended without a message")


@contextmanager
def start_ranks(module: str, arguments: Sequence[str], ranks: int) -> Iterator[RankProcesses]:
    """``python -m module arguments`` as ``ranks`` processes of this host, killed at the end in any case."""
    command = [sys.executable, "-m", module, *arguments]
    pipe = subprocess.PIPE
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank, environment in enumerate(rank_environments(ranks)):
            stdin = subprocess.DEVNULL if rank else pipe
            processes.append(
                subprocess.Popen(command, env=environment, stdin=stdin, stdout=pipe, stderr=pipe, text=True)
            )
        yield RankProcesses(processes)
    finally:
        for process in processes:
            process.kill()  # does nothing to one that has ended
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None and not stream.closed:
                    stream.close()

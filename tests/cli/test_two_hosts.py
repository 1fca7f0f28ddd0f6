"""Ranks on two hosts (network namespaces), started by torchrun: texts of one rank; a host that vanishes is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from commands import environment
from rank_servers import (
    ENDS_WITHIN_S,
    LADDER,
    OPTIONS,
    PLANS,
    PROMPTS,
    TIMEOUT_S,
    artifacts_for_ranks,
    is_running,
    rank_processes,
    texts_of_one_rank,
)
from two_hosts import LINK, Host, two_hosts

from flexspec.sampling import SamplingParams

pytestmark = pytest.mark.ranks

TOKENS = 40
LONG = {"prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
PORT = 8000  # nobody else is on these hosts


@pytest.fixture(scope="module")
def artifact() -> Path:
    return artifacts_for_ranks(PLANS, LADDER.for_batch(1)) / "tp2.fspec"


@contextmanager
def ranks_on(hosts: Sequence[Host], artifact: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A rank a host, each started by a torchrun of its own."""
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", hosts[0].address, "--master-port", "29500"]
    serve = ["-m", "flexspec", "serve", str(artifact), "--port", str(PORT), *OPTIONS]
    started = []
    try:
        for number, host in enumerate(hosts):
            start = [sys.executable, "-m", "torch.distributed.run", *words, "--node-rank", str(number), *serve]
            with host.here():
                started.append(
                    subprocess.Popen(
                        start, env=environment(GLOO_SOCKET_IFNAME=LINK, OMP_NUM_THREADS="1"), stderr=subprocess.DEVNULL
                    )
                )
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def wait_until_ready(http: httpx.Client, launchers: Sequence[subprocess.Popen[bytes]]) -> None:
    while True:
        assert all(launcher.poll() is None for launcher in launchers)
        try:
            assert http.get("/health").json()["status"] == "ok"
            return
        except httpx.ConnectError:
            time.sleep(0.05)


def all_end(launchers: Sequence[subprocess.Popen[bytes]], ranks: Sequence[int], began: float) -> None:
    while any(is_running(rank) for rank in ranks):
        assert time.monotonic() - began < ENDS_WITHIN_S
        time.sleep(0.01)
    assert [launcher.wait(TIMEOUT_S) for launcher in launchers] == [1, 1]


def test_texts_of_one_rank_until_the_other_host_vanishes(artifact: Path) -> None:
    told = texts_of_one_rank(artifact, [(prompt, SamplingParams(max_tokens=TOKENS)) for prompt in PROMPTS])
    with two_hosts() as (first, second), ranks_on((first, second), artifact) as launchers, first.here():
        ask = {"model": "tp2", **LONG}
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=TIMEOUT_S) as http:
            wait_until_ready(http, launchers)
            few = {"model": "tp2", "prompt": PROMPTS, "max_tokens": TOKENS, "temperature": 0}
            body = http.post("/v1/completions", json=few).json()
            assert [choice["text"] for choice in body["choices"]] == told
            ranks = [rank_processes(launcher.pid)[number] for number, launcher in enumerate(launchers)]
            with http.stream("POST", "/v1/completions", json={**ask, "stream": True}) as answer:
                lines = answer.iter_lines()
                text = next(lines)
                second.unplug()
                began = time.monotonic()
                text += "".join(lines)
            assert 1 < time.monotonic() - began < ENDS_WITHIN_S
            assert "rank 1 is gone or silent: no sign of its host for 3 s" in text
        all_end(launchers, ranks, began)


def test_a_stopped_rank_is_waited_for_and_a_lost_one_ends_an_idle_server(artifact: Path) -> None:
    with two_hosts() as (first, second), ranks_on((first, second), artifact) as launchers, first.here():
        ask = {"model": "tp2", **LONG}
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=TIMEOUT_S) as http:
            wait_until_ready(http, launchers)
            ranks = [rank_processes(launcher.pid)[number] for number, launcher in enumerate(launchers)]
            wanted = http.post("/v1/completions", json=ask).json()["choices"][0]["text"]
            with http.stream("POST", "/v1/completions", json={**ask, "stream": True}) as answer:
                lines = answer.iter_lines()
                text = next(lines)
                os.kill(ranks[1], signal.SIGSTOP)
                time.sleep(ENDS_WITHIN_S)  # this is the event: longer than a vanished host is waited for
                os.kill(ranks[1], signal.SIGCONT)
                text += "".join(lines)
            assert "[DONE]" in text and '"error"' not in text
            assert http.post("/v1/completions", json=ask).json()["choices"][0]["text"] == wanted
        first.unplug()
        all_end(launchers, ranks, time.monotonic())

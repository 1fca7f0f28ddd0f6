"""Real ranks over gloo: the tokens of one rank, and every rank can die at any moment without a hang or an orphan."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from artifacts import changed_json
from commands import command, environment, flexspec, serving
from rank_servers import (
    ENDS_WITHIN_S,
    LADDER,
    OPTIONS,
    PLANS,
    PROMPTS,
    STAGES,
    TIMEOUT_S,
    artifacts_for_ranks,
    is_running,
    rank_processes,
    texts_of_one_rank,
)

from flexspec.cli.main import main
from flexspec.errors import PlanError
from flexspec.sampling import SamplingParams

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def folder() -> Path:
    return artifacts_for_ranks(PLANS, LADDER.for_batch(1))


@pytest.fixture(scope="module")
def told(folder: Path) -> list[str]:
    """What one rank answers: greedy, and the last prompt sampled too."""
    asked = [(prompt, SamplingParams(max_tokens=40)) for prompt in PROMPTS]
    asked.append((PROMPTS[-1], SamplingParams(max_tokens=40, temperature=1.0, seed=7)))
    return texts_of_one_rank(folder / "tp2.fspec", asked)


@pytest.mark.parametrize(
    ("name", "draft", "victim"),
    [
        ("tp2", "auto", 1),
        ("tp2", "off", 0),
        ("pp2", "auto", 1),
        ("pp2", "off", 0),
        ("ragged", "auto", 2),
        ("ragged", "off", 1),
    ],
)
def test_ranks_answer_like_one_and_end_when_one_is_killed(
    folder: Path, told: list[str], name: str, draft: str, victim: int
) -> None:
    ranks = max(rank for stage in STAGES[name] for rank in stage.ranks) + 1
    with serving(folder / f"{name}.fspec", "--ranks", str(ranks), "--draft", draft, *OPTIONS) as server:
        processes = rank_processes(server.process.pid)
        assert sorted(processes) == list(range(ranks))
        with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
            ask = {"model": name, "prompt": PROMPTS, "max_tokens": 40, "temperature": 0}
            found = [choice["text"] for choice in http.post("/v1/completions", json=ask).json()["choices"]]
            body = http.post("/v1/completions", json={**ask, "prompt": PROMPTS[-1], "temperature": 1, "seed": 7}).json()
            assert [*found, body["choices"][0]["text"]] == told
            if draft == "auto":
                assert body["usage"]["flexspec"]["accepted"] > 0
            text = ""
            endless = {**ask, "prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True}
            try:
                with http.stream("POST", "/v1/completions", json=endless) as answer:
                    assert answer.status_code == 200
                    lines = answer.iter_lines()
                    text += next(lines)
                    os.kill(processes[victim], signal.SIGKILL)
                    began = time.monotonic()
                    text += "".join(lines)
            except httpx.TransportError:
                text += " error: cut"
        assert time.monotonic() - began < ENDS_WITHIN_S
        assert "error" in text
        assert server.process.wait(TIMEOUT_S) == 1
        assert time.monotonic() - began < ENDS_WITHIN_S
        assert not any(Path(f"/proc/{each}").exists() for each in processes.values())
        assert server.process.stderr is not None
        assert server.process.stderr.read() == f"flexspec serve: rank {victim} ended (killed by SIGKILL)\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_finish(folder: Path, number: signal.Signals) -> None:
    with serving(folder / "tp2.fspec", "--ranks", "2", *OPTIONS) as server:
        processes = rank_processes(server.process.pid)
        ask = {"model": "tp2", "prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with (
            httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http,
            http.stream("POST", "/v1/completions", json=ask) as answer,
        ):
            lines = answer.iter_lines()
            text = next(lines)
            server.process.send_signal(number)
            text += "".join(lines)
        assert '"finish_reason":"length"' in text.replace(" ", "") and "error" not in text
        assert server.process.wait(TIMEOUT_S) == 0
        assert not any(Path(f"/proc/{each}").exists() for each in processes.values())
        assert server.process.stderr is not None and server.process.stderr.read() == ""


def test_ranks_end_with_their_launcher(folder: Path) -> None:
    """Killed before they are ready, when most of their time goes into imports: no one is there to stop them."""
    start = command("serve", folder / "tp2.fspec", "--ranks", "2", "--port", "0", *OPTIONS)
    with subprocess.Popen(start, env=environment(), stderr=subprocess.DEVNULL) as launcher:
        processes: dict[int, int] = {}
        while len(processes) < 2:
            assert launcher.poll() is None
            processes = rank_processes(launcher.pid)
        launcher.kill()
        began = time.monotonic()
        while any(is_running(each) for each in processes.values()):
            assert time.monotonic() - began < ENDS_WITHIN_S
            time.sleep(0.01)


def test_ranks_start_again(folder: Path, told: list[str]) -> None:
    with serving(folder / "pp2.fspec", "--ranks", "2", "--restart", "1", *OPTIONS) as server:
        assert server.process.stderr is not None
        ask = {"model": "pp2", "prompt": PROMPTS, "max_tokens": 40, "temperature": 0}
        with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
            for last in (False, True):
                body = http.post("/v1/completions", json=ask).json()
                assert [choice["text"] for choice in body["choices"]] == told[:-1]
                os.kill(rank_processes(server.process.pid)[1], signal.SIGKILL)
                ended = "flexspec serve: rank 1 ended (killed by SIGKILL); "
                if not last:
                    assert server.process.stderr.readline() == f"{ended}starting again (1 of 1)\n"
                    assert f" on {server.url} " in server.process.stderr.readline()
        assert server.process.wait(TIMEOUT_S) == 1
        assert server.process.stderr.read() == f"{ended}no restarts left of 1\n"


def test_one_process_starts_again(folder: Path) -> None:
    with serving(folder / "tp2.fspec", "--restart", *OPTIONS) as server:
        assert server.process.stderr is not None
        os.kill(rank_processes(server.process.pid)[0], signal.SIGKILL)
        assert "starting again (1 of 3)" in server.process.stderr.readline()
        assert f" on {server.url} " in server.process.stderr.readline()
        assert httpx.get(f"{server.url}/health", timeout=TIMEOUT_S).json()["status"] == "ok"
        assert server.stop() == 0


@pytest.mark.parametrize("what", ["artifact", "version"])
def test_a_rank_that_differs_is_refused(folder: Path, tmp_path: Path, what: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    here = folder / "tp2.fspec"
    other = changed_json(here, tmp_path / "tp2.fspec", "model.json", lambda body: {**body, "name": "other"})
    version = "flexspec.__version__ = '0.0.9'; " if what == "version" else ""
    code = f"import sys, flexspec; {version}from flexspec.cli.main import main; sys.exit(main(sys.argv[1:]))"
    started = []
    for rank, path in enumerate((here, other if what == "artifact" else here)):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        start = ["-m", "flexspec"] if rank == 0 else ["-c", code]
        started.append(
            subprocess.Popen(
                [sys.executable, *start, "serve", str(path), "--port", "0", *OPTIONS],
                env=environment(**variables, GLOO_SOCKET_IFNAME="lo"), stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    for process in started:
        _, said = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 2, said
        assert f"rank 1 has a different {'flexspec version (0.0.9)' if what == 'version' else 'artifact'}" in said


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        pytest.param(("--ranks", "0"), {}, ("FS502",), id="no-ranks"),
        pytest.param(("--ranks", "3"), {}, (PlanError.code, "--ranks 2"), id="not-the-plans"),
        pytest.param(("--restart",), {"RANK": "1", "WORLD_SIZE": "2"}, ("--max-restarts",), id="torchrun-restarts"),
    ],
)
def test_what_cannot_be_started_is_told(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    variables: dict[str, str],
    words: tuple[str, ...],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", str(folder / "tp2.fspec"), *options]) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in words), told


def test_a_user_error_of_the_ranks_is_told_once(folder: Path) -> None:
    done = flexspec("serve", folder / "tp2.fspec", "--ranks", "2", "--restart", "--draft", "wild", "--port", "0")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, "told once, and not tried again"
    assert "'wild'" in done.stderr and "again" not in done.stderr


def test_a_rank_of_another_count_is_refused(folder: Path) -> None:
    """In a process of its own, which a rank ends at once."""
    done = flexspec("serve", folder / "tp2.fspec", "--port", "0", RANK="0", WORLD_SIZE="3")
    assert done.returncode == 2 and PlanError.code in done.stderr and "--ranks 2" in done.stderr

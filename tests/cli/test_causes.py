"""What the system refuses, and SIGTERM, end a command in one line; nothing half written is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from artifacts import tiny_artifact, write_models
from commands import command, environment, flexspec

from flexspec.cli import main as door
from flexspec.kernels.cpu.build import supported_isas

BEST = supported_isas()[0]


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (OSError(5, "Input/output error", "model.gguf"), "FS402"),
        (OSError("no errno at all"), "FS402"),
        (MemoryError(), "FS502"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "FS402"),
        (RecursionError("maximum recursion depth exceeded"), "FS402"),
    ],
)
def test_what_the_system_refuses_is_one_line(
    cause: Exception, code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(cause, monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"flexspec inspect: {code}: ") and error.count("\n") == 1


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        run_with(KeyError("ours"), monkeypatch)


def run_with(cause: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def fail(args: Namespace) -> int:
        raise cause

    def parser(command: str | None) -> object:
        return Namespace(parse_args=lambda words: Namespace(run=fail, command="inspect"))

    monkeypatch.setattr(door, "build_parser", parser)
    return door.main(["inspect", "x"])


def shell(words: tuple[object, ...], redirection: str) -> subprocess.CompletedProcess[str]:
    line = f'exec "$@" {redirection}'
    return subprocess.run(
        ["sh", "-c", line, "sh", *command(*words)], env=environment(), capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("redirection", [">&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_as_good_as_unread_ones(redirection: str) -> None:
    done = shell(("inspect", tiny_artifact()), redirection)
    assert done.returncode == 0 and done.stderr == ""


def test_a_full_disk_behind_the_output_is_told() -> None:
    done = shell(("inspect", tiny_artifact()), ">/dev/full")
    assert done.returncode == 2 and "No space left" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow(reason="compiles")
@pytest.mark.parametrize("where", ["taken/x.fspec", "taken/deep/x.fspec"])
def test_an_artifact_under_a_file_is_refused_in_one_line(tmp_path: Path, where: str) -> None:
    llm, _ = write_models(tmp_path)
    (tmp_path / "taken").write_text("mine")
    done = flexspec("compile", llm, "-o", tmp_path / where, "--isa", BEST)
    assert done.returncode == 2 and "FS402" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.slow(reason="builds without a cache")
def test_a_cache_that_cannot_be_used_costs_only_time(tmp_path: Path) -> None:
    llm, _ = write_models(tmp_path)
    done = flexspec("compile", llm, "-o", tmp_path / "x.fspec", "--isa", BEST, FLEXSPEC_CACHE="/proc/none")
    assert done.returncode == 0 and done.stderr.count("/proc/none") == 1, done.stderr
    assert flexspec("inspect", tmp_path / "x.fspec").returncode == 0


@pytest.mark.slow(reason="builds in a cache of its own")
def test_sigterm_ends_compile_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    llm, _ = write_models(tmp_path)
    process = subprocess.Popen(
        command("compile", llm, "-o", tmp_path / "out/tiny.fspec", "--isa", BEST),
        env=environment(FLEXSPEC_CACHE=str(tmp_path / "cache")), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out").glob(".tiny.fspec.partial-*")):
        assert process.poll() is None and time.monotonic() < deadline
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143 and error.endswith("flexspec compile: ended by SIGTERM\n"), error
    assert "Traceback" not in error and os.listdir(tmp_path / "out") == []


@pytest.mark.slow(reason="compiles twice at a time")
def test_two_compilers_with_one_process_id_make_one_sound_artifact(tmp_path: Path) -> None:
    llm, _ = write_models(tmp_path)
    script = "import os, sys; os.getpid = lambda: 1\nfrom flexspec.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    words = [str(word) for word in ("compile", llm, "-o", tmp_path / "s/x.fspec", "--isa", BEST)]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, *words], env=environment(FLEXSPEC_CACHE=str(tmp_path / "cache")),
            stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in both:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
    assert flexspec("inspect", tmp_path / "s/x.fspec").returncode == 0
    assert os.listdir(tmp_path / "s") == ["x.fspec"]

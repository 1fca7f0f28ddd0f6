"""compile, generate and serve as commands: what they print, what they refuse, and being killed in the middle."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from artifacts import tiny_artifact, write_models
from commands import command, environment, flexspec

from flexspec.cli.main import COMMANDS, build_parser, main
from flexspec.kernels.cpu.build import supported_isas

BEST = supported_isas()[0]


@pytest.fixture(scope="module")
def artifact() -> Path:
    return tiny_artifact()


@pytest.mark.slow(reason="four processes")
def test_compile_then_generate_with_and_without_speculation(tmp_path: Path, artifact: Path) -> None:
    llm, ssm = write_models(tmp_path)
    done = flexspec("compile", llm, "--ssm", ssm, "-o", "tiny.fspec", "--isa", BEST, "--dump-ir", "ir", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r".*/tiny.fspec: \d+ MB, draft plan budget:24/sources=suffix\+ngram\+ssm\n", done.stdout)
    assert "packing weights" in done.stderr and (tmp_path / "ir/llm/00_input.fsg").is_file()
    texts = []
    for draft in ("auto", "off"):
        done = flexspec(
            "generate", tmp_path / "tiny.fspec", "-p", "hello", "--max-tokens", "20", "--draft", draft, "--threads", "1"
        )
        assert done.returncode == 0 and re.search(r"\[\d+ tokens, .*draft .*finished: (length|stop)\]", done.stderr)
        texts.append(done.stdout)
    assert texts[0] == texts[1] != "\n"


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("generate {folder}/no.fspec -p x", "FS401", "does not exist"),
        ("generate {artifact} -p x --draft budget:3/sources=ssm3", "FS401", "ssm3"),
        ("generate {artifact} -p x --temperature 7", "FS501", "temperature"),
        (f"generate {{artifact}} -p {'x' * 900}", "FS502", "fewer than 256"),
        ("generate {artifact} -p x --context 10", "FS502", "or raise --context"),
        ("generate {artifact} -p x --context 9000", "FS502", "2 to 256, the model's own"),
        ("generate {llm} -p x", "FS401", "tiny.gguf is a model, not an artifact"),
        ("serve {ssm} --port 0", "FS401", "out='ssm.fspec')), then pass ssm.fspec"),
        ("generate {artifact} -p x --kv-tokens 1", "FS502", "--kv-tokens"),
        ("compile {llm} -o {folder}/x.fspec --isa mmx", "FS301", "--isa mmx"),
        ("compile {folder}/no.gguf -o {folder}/x.fspec", "FS203", "no.gguf"),
        ("compile {llm} -o {llm}", "FS401", "is not an artifact"),
    ],
    ids=lambda value: value.replace("x" * 900, "long") if " " in value and "{" in value else "",
)
def test_errors_are_one_line_and_exit_code_two(
    tmp_path: Path,
    artifact: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    code: str,
    words: str,
) -> None:
    monkeypatch.delenv("FLEXSPEC_DEBUG", raising=False)
    llm, ssm = write_models(tmp_path)
    places = {"llm": llm, "ssm": ssm, "folder": tmp_path, "artifact": artifact}
    arguments = [word.format(**places) for word in line.split()]
    assert main(arguments) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"flexspec {arguments[0]}: {code}: ") and words in told and "Fix: " in told
    assert not (tmp_path / "x.fspec").exists() and llm.is_file()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_a_command_that_parses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    text = capsys.readouterr().out
    example = text[text.index("example:") :].replace("\\\n", " ").splitlines()[1:]
    lines = [line.strip() for line in example if line.strip().startswith(f"flexspec {name} ")]
    assert lines
    for line in lines:
        build_parser(name).parse_args(shlex.split(line.split("|")[0])[1:])


def test_a_busy_port_is_told_before_the_artifact_is_looked_at(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = flexspec("serve", tmp_path / "does-not-exist.fspec", "--port", str(port))
    assert done.returncode == 2 and "FS602" in done.stderr and f"127.0.0.1:{port}" in done.stderr


@pytest.mark.slow(reason="builds in a cache of its own, twice")
def test_a_killed_compile_leaves_nothing_that_matters(tmp_path: Path) -> None:
    llm, ssm = write_models(tmp_path)
    arguments = ("compile", llm, "--ssm", ssm, "-o", tmp_path / "out/tiny.fspec", "--isa", BEST)
    process = subprocess.Popen(
        command(*arguments), env=environment(FLEXSPEC_CACHE=str(tmp_path / "cache")), stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (partial := list((tmp_path / "out").glob(".tiny.fspec.partial-*"))):
        assert process.poll() is None and time.monotonic() < deadline
    os.killpg(process.pid, signal.SIGKILL)  # compiler included
    assert process.wait() == -signal.SIGKILL and partial
    assert not (tmp_path / "out/tiny.fspec").exists()
    done = flexspec(*arguments)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tiny.fspec"]

"""The command line: every option is explained, the option list is frozen, errors are one line and an exit code."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from pathlib import Path

import pytest

from flexspec import draft_plan
from flexspec.cli import main as cli
from flexspec.drafters.record import draft_options, source_names
from flexspec.errors import RequestError
from flexspec.sampling import sampling_fields
from repository import ROOT, tracked_files

GOLDEN = Path(__file__).parent / "golden" / "cli_options.txt"


def subparser(command: str) -> argparse.ArgumentParser:
    parser = cli.build_parser(command)
    action = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    found = action.choices[command]
    assert isinstance(found, argparse.ArgumentParser)
    return found


def option_lines(command: str) -> list[str]:
    names = [", ".join(action.option_strings) or action.dest for action in subparser(command)._actions]
    return [f"{command} {name}" for name in names]


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_option_is_explained(command: str) -> None:
    silent = [action.dest for action in subparser(command)._actions if not action.help]
    assert silent == []
    assert "example" in (subparser(command).epilog or ""), "the help ends with something to run"


def test_option_list_is_frozen() -> None:
    """Scripts depend on these: they are changed knowingly."""
    lines = [line for command in cli.COMMANDS for line in option_lines(command)]
    if os.environ.get("FLEXSPEC_UPDATE_GOLDEN"):
        GOLDEN.write_text("".join(f"{line}\n" for line in lines))
    frozen = GOLDEN.read_text().splitlines()
    recorded = {f"generate --{name.replace('_', '-')}" for name in sampling_fields()}  # test_sampling.py has new ones
    fix = "FLEXSPEC_UPDATE_GOLDEN=1 pytest tests/test_cli.py writes the list anew; note the change in CHANGELOG.md"
    assert [line for line in lines if line in frozen or line not in recorded] == frozen, fix


@pytest.mark.parametrize("command", ["compile", "generate", "serve"])
def test_help_lists_every_draft_plan(command: str) -> None:
    epilog = subparser(command).epilog or ""
    table = epilog[: epilog.index("example:")]
    named = set(re.findall(r"^ +(\w+)", table, re.MULTILINE)) | set(re.findall(r"\b(\w+)=", table))
    options = {*draft_plan._FIELDS, *(option.name for option in draft_options())}
    assert named >= {*draft_plan.METHODS, *options} and set(source_names()[:4]) <= set(re.findall(r"\w+", table))
    assert set(draft_plan.SAMPLED) <= set(re.findall(r"\w+", table))
    for text in re.findall(r"as in (\S+):", table):
        draft_plan.DraftPlan.parse(text)


def demo_paths() -> set[str]:
    """Files that ``make demo`` leaves, and files and folders of the repository."""
    source = (ROOT / "examples" / "demo.py").read_text()
    tracked = {str(path) for path in tracked_files() if path.parts[0] == "examples"}
    return {*re.findall(r'ROOT / "(build/[^"]+)"', source), "ssm/smollm2-135m", *tracked}


@pytest.mark.parametrize("command", [None, *cli.COMMANDS])
def test_examples_of_the_help_work_after_make_demo(command: str | None) -> None:
    epilog = (subparser(command) if command else cli.build_parser()).epilog or ""
    lines = [line.split("|")[0] for line in epilog.splitlines() if line.startswith("  flexspec ")]
    assert lines
    for line in lines:
        words = shlex.split(line)[1:]
        args = cli.build_parser(words[0]).parse_args(words)
        read = [getattr(args, name, None) for name in ("model", "artifact", "what")] + list(getattr(args, "ssm", []))
        assert {str(path) for path in read if isinstance(path, Path)} <= demo_paths(), line


def test_wrong_usage_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["no-such-command"], ["--no-such-option"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        assert exit_.value.code == 2
    assert "invalid choice: 'no-such-command'" in capsys.readouterr().err


def fail_with(error: BaseException) -> argparse.ArgumentParser:
    def run(args: argparse.Namespace) -> int:
        raise error

    parser = argparse.ArgumentParser()
    parser.set_defaults(run=run, command="serve")
    return parser


def test_typed_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    error = RequestError("top_p is 7", "a number from 0 to 1", "pass top_p=1")
    monkeypatch.setattr(cli, "build_parser", lambda command: fail_with(error))
    monkeypatch.delenv("FLEXSPEC_DEBUG", raising=False)
    assert cli.main([]) == 2
    assert capsys.readouterr().err == (
        "flexspec serve: FS501: top_p is 7; expected a number from 0 to 1. Fix: pass top_p=1\n"
    )
    monkeypatch.setenv("FLEXSPEC_DEBUG", "1")
    with pytest.raises(RequestError):
        cli.main([])


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "build_parser", lambda command: fail_with(KeyboardInterrupt()))
    assert cli.main([]) == 130

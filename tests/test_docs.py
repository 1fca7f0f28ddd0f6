"""Documents and code say the same: links resolve, commands exist, the tour leads through real files."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from flexspec.cli.main import COMMANDS, build_parser
from repository import ROOT, tracked_files

FENCE = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)([^)#\s]+)[^)]*\)")
TOUR_STOP = re.compile(r"^\d+\. \[`([^`]+)`\]\(\.\./([^)]+)\)", re.MULTILINE)
MAX_TOUR_STOPS = 7
# Paths that exist on one machine only. Fixtures write such paths as /data/....
MACHINE_PATH = re.compile(rb"(?<![\w.~-])/(?:home|root|work|Users|mnt|scratch)/\w")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK|TBD)\b|NotImplementedError\(\)")


def documents() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".md"]


def shell_lines(document: Path) -> list[list[str]]:
    """Commands of the document's shell blocks as words; comments, prompts and variable assignments are dropped."""
    lines: list[list[str]] = []
    for block in FENCE.findall((ROOT / document).read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words:
                lines.append(words)
    return lines


def commands_named(program: str) -> list[tuple[Path, list[str]]]:
    return [
        (document, words[1:])
        for document in documents()
        for words in shell_lines(document)
        if words[0].removeprefix(".venv/bin/") == program
    ]


def test_links_in_documents_resolve() -> None:
    broken = []
    for document in documents():
        for target in LINK.findall((ROOT / document).read_text()):
            if not (ROOT / document.parent / target).exists():
                broken.append(f"{document}: {target}")
    assert broken == []


def test_make_targets_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = [(document, words[0]) for document, words in commands_named("make") if words]
    assert used, "the README shows how to start"
    assert [f"{document}: make {target}" for document, target in used if target not in targets] == []


def test_flexspec_commands_in_documents_parse() -> None:
    shown = commands_named("flexspec")
    assert {words[0] for _, words in shown} >= set(COMMANDS) - {"inspect"}, "a command is not documented"
    wrong = []
    for document, words in shown:
        complaint = io.StringIO()
        words = words[: words.index("&")] if "&" in words else words
        try:
            with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(io.StringIO()):
                build_parser(words[0]).parse_args(words)
        except SystemExit as exit_:
            if exit_.code:
                wrong.append(f"{document}: flexspec {shlex.join(words)}: {complaint.getvalue().splitlines()[-1]}")
    assert wrong == []


def test_scripts_in_documents_exist() -> None:
    scripts = [words[0] for _, words in commands_named("python") if words and words[0].endswith(".py")]
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_tour_leads_through_existing_files() -> None:
    sections = (ROOT / "docs/tour.md").read_text().split("\n## ")[1:]
    routes = {section.splitlines()[0]: TOUR_STOP.findall(section) for section in sections}
    routes = {title: stops for title, stops in routes.items() if stops}
    assert len(routes) >= 2
    for title, stops in routes.items():
        assert 3 <= len(stops) <= MAX_TOUR_STOPS, title
        for shown, link in stops:
            assert shown == link
            assert (ROOT / link).is_file(), f"{title}: {link}"


def test_no_paths_of_one_machine() -> None:
    found = [
        f"{path}: {match[0].decode()}"
        for path in tracked_files()
        if not (ROOT / path).is_dir() and (match := MACHINE_PATH.search((ROOT / path).read_bytes()))
    ]
    assert found == []


def test_nothing_is_left_unfinished() -> None:
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in tracked_files()
        if path.suffix in {".py", ".md", ".toml", ".cpp", ".h", ".j2", ".html"} and path.name != Path(__file__).name
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert found == []

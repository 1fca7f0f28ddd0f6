"""Options of ``serve`` about HTTP."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from flexspec.cli.serving.http_options import KEY_VARIABLE, add_http_arguments, door_options
from flexspec.errors import RequestError
from flexspec.runtime.server.door import DoorOptions, key_digest


def door(*words: str) -> DoorOptions:
    parser = argparse.ArgumentParser()
    add_http_arguments(parser)
    return door_options(parser.parse_args(words))


def test_keys_come_from_options_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("two\n\n three \n")
    assert door().key_digests == ()
    named = door("--api-key", "one", "--api-key-file", str(file)).key_digests
    assert named == tuple(map(key_digest, ("one", "two", "three")))
    monkeypatch.setenv(KEY_VARIABLE, "four")
    assert door().key_digests == (key_digest("four"),)
    assert door("--api-key", "one").key_digests == (key_digest("one"),)


@pytest.mark.parametrize(
    "words",
    [
        ("--api-key", ""),
        ("--api-key-file", "/does/not/exist"),
        ("--api-key-file", "/dev/null"),
        ("--root-path", "llm"),
        ("--default-max-tokens", "0"),
        ("--access-log", "/does/not/exist"),
    ],
    ids=" ".join,
)
def test_options_that_cannot_be(words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match=words[0]):
        door(*words)


def test_origins_and_paths() -> None:
    options = door("--cors-origin", "http://localhost:3000/", "--cors-origin", "*", "--root-path", "/llm/")
    assert (options.origins, options.root_path) == (("http://localhost:3000", "*"), "/llm")


def test_the_access_log_appends_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    for number in range(2):
        write = door("--access-log", str(path)).access_log
        assert write is not None
        write({"number": number})
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 1]
    out = door("--access-log", "-").access_log
    assert out is not None
    out({"number": 2})
    assert capsys.readouterr().out == '{"number": 2}\n'


def test_a_log_that_cannot_be_written_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    write = door("--access-log", "/dev/full").access_log
    assert write is not None
    write({})
    write({})
    assert capsys.readouterr().err.count("cannot write to the access log /dev/full") == 1

"""A device is one file: dropped in, ``--device`` offers it, and what it opens is what runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from artifacts import tiny_artifact

import flexspec.runtime.backends
from flexspec import LLM, SamplingParams
from flexspec.cli.main import build_parser
from flexspec.errors import CapacityError

DEVICE = '''
"""The CPU by another name, which takes small trees only."""

from flexspec.errors import CapacityError
from flexspec.runtime.backends.registry import Backend

MOST_ROWS = 40


def _open(artifact, needs):
    from flexspec.runtime.backends.programs import CpuPrograms

    if needs.tree_rows > MOST_ROWS:
        raise CapacityError(f"token trees of {needs.tree_rows} nodes", f"at most {MOST_ROWS}", "choose a smaller plan")
    return CpuPrograms.of(artifact, needs)


BACKEND = Backend("abacus", _open, process_group="gloo", in_host_memory=True, help="beads")
'''


@pytest.fixture(autouse=True)
def abacus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device in a file of its own, gone afterwards."""
    package = flexspec.runtime.backends
    (tmp_path / "abacus.py").write_text(DEVICE)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    yield
    sys.modules.pop("flexspec.runtime.backends.abacus", None)


def answer(device: str, draft: str) -> list[int]:
    with LLM(tiny_artifact(), device=device, draft=draft, threads=1, kv_tokens=1024, measure=False) as llm:
        return list(llm.generate("hello 12", SamplingParams(max_tokens=12))[0].token_ids)


def test_it_runs_what_the_cpu_runs() -> None:
    assert answer("abacus", "budget:16") == answer("cpu", "off")


def test_its_limits_are_refused_at_start() -> None:
    with pytest.raises(CapacityError, match="token trees of 65 nodes"):
        answer("abacus", "budget:64")


@pytest.mark.parametrize("words", [["serve", "x.fspec"], ["generate", "x.fspec", "-p", "hello"]])
def test_the_commands_offer_it(words: list[str]) -> None:
    assert build_parser(words[0]).parse_args([*words, "--device", "abacus"]).device == "abacus"

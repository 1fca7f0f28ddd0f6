"""The Python in README and docs/python.md, run as it stands there, on tiny models under the names that it uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from artifacts import tiny_artifact, write_models

from repository import ROOT

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SNIPPETS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in ("README.md", "docs/python.md")
    for number, block in enumerate(_BLOCK.findall((ROOT / page).read_text()))
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with what the snippets name."""
    llm, ssm = write_models(tmp_path / "tiny")
    (tmp_path / "build/models").mkdir(parents=True)
    (tmp_path / "ssm").mkdir()
    (tmp_path / "build/smollm2.fspec").symlink_to(tiny_artifact())
    (tmp_path / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf").symlink_to(llm)
    (tmp_path / "ssm/smollm2-135m").symlink_to(ssm)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


def test_both_pages_have_some() -> None:
    assert {"README.md-0", "docs/python.md-0", "docs/python.md-1"} <= {str(each.id) for each in SNIPPETS}


@pytest.mark.parametrize("code", SNIPPETS)
def test_a_snippet_runs_as_written(code: str, here: None, capsys: pytest.CaptureFixture[str]) -> None:
    if "out=" in code:  # compiling replaces what is there
        Path("build/smollm2.fspec").unlink()
    exec(compile(code, "snippet", "exec"), {})
    assert capsys.readouterr().out.strip()

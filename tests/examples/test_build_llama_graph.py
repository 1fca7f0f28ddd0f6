"""The graph-building example runs, and the graph it builds by hand is the library's."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "build_llama_graph.py"


def test_example_runs_and_matches_the_model_file(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["main"]()
    out = capsys.readouterr().out.splitlines()
    by_hand, by_library = (part.split()[-1] for part in out[0].split(","))
    assert by_hand == by_library
    assert "42 operators before the passes, 30 after" in "\n".join(out)
    assert [line for line in out if line.startswith("node 3")][0].startswith("node 3 (path [5, 9, 7]): next token ")

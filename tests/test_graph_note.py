"""The design note on the graph lists every operator and every pass."""

from __future__ import annotations

import re
from pathlib import Path

from flexspec.compiler.passes.pipeline import LLM_PASSES, SSM_PASSES
from flexspec.ops.record import all_records

NOTE = (Path(__file__).parents[1] / "docs" / "design" / "graph.md").read_text()


def _first_column(title: str) -> set[str]:
    table = NOTE.split(f"| {title} |")[1].split("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_every_operator_is_in_the_note() -> None:
    assert _first_column("operator") == set(all_records())


def test_every_pass_is_in_the_note() -> None:
    assert _first_column("pass") == {step.name for step in (*LLM_PASSES, *SSM_PASSES)}

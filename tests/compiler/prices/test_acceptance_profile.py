"""Acceptance profiles: those that ship name their source and use draft plans that exist; bad ones are refused."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from flexspec.compiler.prices.acceptance_profile import PROFILES, find_acceptance, open_acceptance, shipped_profiles
from flexspec.draft_plan import DraftPlan
from flexspec.errors import ProfileError
from repository import ROOT

PAPER = json.loads((PROFILES / "specinfer-llama-7b.json").read_text())


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles(name: str) -> None:
    profile = open_acceptance(name)
    assert profile.origin and profile.date and profile.prompts
    for entry in profile.entries:
        assert DraftPlan.parse(str(entry.draft)) == entry.draft
        assert 1 <= entry.committed_tokens <= len(entry.levels) + 1


def test_the_profile_of_an_ssm_is_found_by_its_name() -> None:
    assert find_acceptance(["llama-68m"]).name == "specinfer-llama-7b"
    with pytest.raises(ProfileError, match="opt-125m.*flexspec bench .* measures one"):
        find_acceptance(["opt-125m"])
    with pytest.raises(ProfileError, match="specinfer-llama-7b"):
        open_acceptance("nothing")


def test_rows_of_a_tree() -> None:
    tree = next(e for e in open_acceptance("specinfer-llama-7b").entries if e.draft.vector[:3] == (1, 1, 3))
    assert (tree.nodes, tree.rows(1), tree.rows(4)) == (20, 21, 84)
    assert tree.ssm_rows == (4, 1, 1, 3, 3, 3, 3, 3)
    assert tree.most_rows == 21


def test_memory_counts_the_largest_tree_and_not_the_mean(tmp_path: Path) -> None:
    entry = {"draft": "chain:2", "levels": [0.5, 0.3], "committed_tokens": 1.2}
    path = tmp_path / "p.json"
    for more, rows in (({}, 3), ({"most_nodes": 2}, 3), ({"most_nodes": 7}, 8)):
        path.write_text(json.dumps({**PAPER, "entries": [{**entry, **more}]}))
        assert open_acceptance(str(path)).entries[0].most_rows == rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "flexspec acceptance 9"}, "format"),
        ({"colour": "red"}, "colour: an unknown key"),
        ({"date": ""}, "date: ''"),
        ({"entries": []}, "entries"),
        ({"entries": PAPER["entries"][:1] * 2}, "repeated"),
        ({"entries": [{"draft": "off", "levels": [1], "committed_tokens": 1}]}, "other than off"),
        ({"entries": [{"draft": "chain:1", "levels": [1], "committed_tokens": 2.5}]}, "1 to 2"),
        ({"entries": [{"draft": "chain:1", "levels": [0], "committed_tokens": 1}]}, "entries[0].levels: [0]"),
        ({"entries": [{"draft": "chain:1", "levels": [1], "committed_tokens": float("nan")}]}, "committed_tokens"),
        ({"entries": [{"draft": "chain:1", "levels": [1]}]}, "committed_tokens: missing"),
        ({"entries": [{"draft": "chain:1"}]}, "entries[0]: levels, committed_tokens: missing; expected all of draft,"),
        (
            {"entries": [{"draft": "chain:1", "level": [1]}]},
            "entries[0].level: an unknown key; expected perhaps levels",
        ),
        ({"entries": [{"draft": "chain:1", "levels": [10**400], "committed_tokens": 1}]}, "levels"),
        ({"entries": [{"draft": "chain:1", "levels": [1], "committed_tokens": 1, "ssm_rows": [1e9]}]}, "1e+09"),
        ({"entries": [{"draft": "chain:1", "levels": [1.5], "committed_tokens": 1, "most_nodes": 1}]}, "from 2 to"),
        ({"ssms": [""]}, "ssms: ['']"),
        ({"entries": [{"draft": "chain:1", "levels": [1000], "committed_tokens": 1}]}, "1000 nodes"),
    ],
)
def test_bad_profiles_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**PAPER, **change}))
    with pytest.raises(ProfileError) as error:
        open_acceptance(str(path))
    assert message in str(error.value)


def test_all_missing_keys_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"format": PAPER["format"], "entries": PAPER["entries"]}))
    with pytest.raises(ProfileError, match="p.json: ssms, llm, origin, date, prompts, sampling: missing"):
        open_acceptance(str(path))


def test_the_example_of_the_note_opens(tmp_path: Path) -> None:
    note = (ROOT / "docs" / "design" / "planning.md").read_text()
    block = note[note.index('    {\n      "format": "flexspec acceptance 1"') :].split("\n\n")[0]
    (tmp_path / "p.json").write_text(textwrap.dedent(block))
    profile = open_acceptance(str(tmp_path / "p.json"))
    assert len(profile.entries) == 2 and profile.entries[1].most_rows == 1 + 7

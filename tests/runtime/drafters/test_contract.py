"""What every drafter without a model promises the engine, whatever it drafts from; drafters are found by presence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from numpy.typing import NDArray

from flexspec.compiler.artifact.ngram_table import build_table
from flexspec.draft_plan import DraftPlan
from flexspec.drafters.record import drafter_records
from flexspec.runtime.drafters.base import Drafter, DraftRequest
from flexspec.runtime.drafters.make import DrafterInputs, make_drafter
from flexspec.sampling import SamplingParams
from flexspec.tree import TokenTree

VOCAB = 7
TEXT = [1, 2, 3, 4, 5, 6] * 40
RECORDS = {record.name: record for record in drafter_records() if not record.runs_ssms}
# A table for each drafter that reads one, good enough to go on with TEXT.
TABLES: dict[str, Mapping[str, NDArray[Any]]] = {"ngram": build_table([(TEXT[:6], TEXT)])}


@pytest.fixture(params=RECORDS)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    """With request 1 begun, whose text is TEXT and three tokens more."""
    name: str = request.param
    inputs = DrafterInputs(name, (DraftPlan(sources=(name,)),), VOCAB, TABLES.get(name))
    drafter = make_drafter(RECORDS[name], inputs)
    assert drafter.name == name
    drafter.begin(1, TEXT)
    drafter.observe(1, TEXT[:3], None)
    return drafter


def draft(drafter: Drafter, request_id: int = 1, nodes: int = 16, depth: int = 8) -> TokenTree:
    return drafter.propose([DraftRequest(request_id, TEXT[2], nodes, depth, SamplingParams())])[0]


@pytest.mark.parametrize(("nodes", "depth"), [(0, 8), (1, 1), (3, 8), (16, 2), (255, 64)])
def test_a_tree_hangs_on_the_last_token_and_keeps_to_its_limits(drafter: Drafter, nodes: int, depth: int) -> None:
    tree = draft(drafter, nodes=nodes, depth=depth)
    assert tree.tokens[0] == TEXT[2] and len(tree) - 1 <= nodes and max(tree.depths) <= depth
    assert (len(tree) > 1) == (nodes > 0)
    assert all(0 <= token < VOCAB for token in tree.tokens)
    assert set(tree.sources[1:]) <= {drafter.name}
    assert all(0.0 < score <= 1.0 for score in tree.scores)


def test_nothing_is_drawn_and_drafting_changes_nothing(drafter: Drafter) -> None:
    assert draft(drafter) == draft(drafter)


def test_requests_do_not_touch_each_other(drafter: Drafter) -> None:
    before = draft(drafter)
    drafter.begin(2, [0, 0, 0])
    drafter.observe(2, [6, 6], None)
    assert draft(drafter) == before
    drafter.end(2)
    assert draft(drafter) == before


def test_a_request_that_is_unknown_or_ended_gets_a_root(drafter: Drafter) -> None:
    drafter.observe(9, [1, 2], None)
    drafter.end(9)
    assert len(draft(drafter, 9)) == 1
    drafter.end(1)
    assert len(draft(drafter)) == 1


@pytest.mark.parametrize("prompt", [[], [0], [VOCAB + 5, VOCAB + 5]])
def test_no_text_makes_it_raise(drafter: Drafter, prompt: list[int]) -> None:
    drafter.begin(3, prompt)
    drafter.observe(3, [TEXT[2]], None)
    assert draft(drafter, 3).tokens[0] == TEXT[2]

"""Trees from the n-gram table: the most likely nodes by path, and per-request state."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexspec.compiler.artifact.ngram_table import build_table
from flexspec.runtime.drafters.base import DraftRequest
from flexspec.runtime.drafters.ngram import NgramDrafter, NgramModel, expand_ngrams
from flexspec.sampling import SamplingParams

GREEDY = SamplingParams()
MODEL = NgramModel(build_table([([1], [2, 3, 4, 1, 2, 3, 5, 2, 3, 4, 4, 1, 3, 2]), ([5], [1, 2, 3, 4, 2, 5, 5, 3])]))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 30), st.integers(0, 3))
def test_tree_is_the_most_likely_part_of_the_full_one(context: list[int], nodes: int, depth: int) -> None:
    tree = expand_ngrams(MODEL, tuple(context), context[-1], nodes, depth)
    chances: dict[tuple[int, ...], float] = {}
    for length in range(1, depth + 1):
        for path in itertools.product(range(1, 6), repeat=length):
            chance = 1.0
            for i, token in enumerate(path):
                window = (*context, *path[:i])[-MODEL.reach :]
                chance *= dict(MODEL.successors(window)).get(token, 0.0)
            if chance:
                chances[path] = chance
    have = {tuple(tree.tokens[node] for node in tree.path(i)[1:]) for i in range(1, len(tree))}
    assert len(have) == len(tree) - 1 == min(nodes, len(chances))
    best = sorted(chances.values(), reverse=True)[: len(have)]
    assert sorted((chances[path] for path in have), reverse=True) == pytest.approx(best)
    assert set(tree.sources[1:]) <= {"ngram"}


def test_requests_follow_their_own_text() -> None:
    drafter = NgramDrafter(MODEL)
    drafter.begin(1, [9, 9, 9, 9, 1])
    drafter.begin(2, [])
    drafter.observe(1, [2, 3], None)
    drafter.observe(2, [5], None)
    ask = [DraftRequest(1, 3, 4, 2, GREEDY), DraftRequest(2, 5, 4, 2, GREEDY), DraftRequest(3, 7, 4, 2, GREEDY)]
    trees = drafter.propose(ask)
    assert trees[0] == expand_ngrams(MODEL, (1, 2, 3), 3, 4, 2) and trees[1] == expand_ngrams(MODEL, (5,), 5, 4, 2)
    assert len(trees[2]) == 1
    drafter.end(1)
    drafter.end(1)
    assert len(drafter.propose(ask)[0]) == 1
    assert len(drafter.propose([DraftRequest(2, 5, 0, 4, GREEDY)])[0]) == 1


def test_the_cache_is_bounded_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexspec.runtime.drafters.ngram.CACHED_CONTEXTS", 3)
    model = NgramModel(build_table([([1], [2, 3, 4, 1, 2, 3, 5, 2, 3, 4, 4, 1, 3, 2])]))
    contexts = [(1,), (2, 3), (3, 4, 4), (1,), (9, 9, 9), (2, 3)]
    assert [model.successors(c) for c in contexts] == [model.successors(c) for c in contexts]
    assert len(model._cache) <= 3

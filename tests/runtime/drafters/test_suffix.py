"""The suffix automaton against brute force, and the trees drawn from it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flexspec.runtime.drafters.base import DraftRequest
from flexspec.runtime.drafters.suffix import CONFIDENCE, SuffixAutomaton, SuffixDrafter, expand_matches
from flexspec.sampling import SamplingParams
from flexspec.tree import TokenTree

GREEDY = SamplingParams()
texts = st.lists(st.integers(0, 3), max_size=40)


def longest_match(text: list[int]) -> int:
    """Length of the longest suffix that also ends earlier, by definition."""
    for n in range(len(text) - 1, 0, -1):
        if any(text[i : i + n] == text[-n:] for i in range(len(text) - n)):
            return n
    return 0


def occurrences(text: list[int], part: list[int]) -> list[int]:
    """End positions of ``part`` in ``text``."""
    return [i + len(part) for i in range(len(text) - len(part) + 1) if text[i : i + len(part)] == part]


def walk(automaton: SuffixAutomaton, part: list[int]) -> int | None:
    state: int | None = 0
    for token in part:
        state = automaton.next[state].get(token) if state is not None else None
    return state


@given(texts)
def test_match_is_the_longest_repeated_suffix(text: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    assert max(automaton.length[automaton.link[automaton.last]], 0) == longest_match(text)


@given(texts, texts)
def test_accepts_exactly_the_substrings_with_their_counts(text: list[int], other: list[int]) -> None:
    automaton = SuffixAutomaton(text[:24])  # short enough for counts to be exact
    for part in [other, *(text[i:j] for i in range(0, len(text), 3) for j in range(i + 1, len(text), 4))]:
        state = walk(automaton, part)
        ends = occurrences(text[:24], part)
        assert (state is not None) == (bool(ends) or not part)
        if state and part:
            assert automaton.count[state] == len(ends) and automaton.end[state] == ends[-1]


@given(texts, texts)
def test_extending_is_the_same_as_building_at_once(first: list[int], second: list[int]) -> None:
    grown = SuffixAutomaton(first)
    grown.extend(second)
    whole = SuffixAutomaton(first + second)
    assert (grown.next, grown.link, grown.count, grown.end) == (whole.next, whole.link, whole.count, whole.end)


@given(texts, st.integers(0, 12), st.integers(0, 20))
def test_every_path_continues_a_match(text: list[int], nodes: int, depth: int) -> None:
    """A drafted path, behind some repeated suffix, occurred in the text (or in its periodic continuation)."""
    tree = expand_matches(SuffixAutomaton(text), text[-1] if text else 0, nodes, depth)
    assert len(tree) <= nodes + 1 and max(tree.depths) <= min(depth, 16)
    paths = [tuple(tree.tokens[node] for node in tree.path(i)[1:]) for i in range(len(tree))]
    assert len(set(paths)) == len(paths), "no node twice"
    assert all(0.0 < score <= 1.0 for score in tree.scores)
    if longest_match(text):
        for path in paths[1:]:
            assert occurrences(text, [text[-1], path[0]]), "the first token has followed the last one before"


def test_longest_match_decides_and_its_length_sets_the_score() -> None:
    text = [1, 2, 3, 4, 50, 51, 52, 9, 4, 60, 61, 7, 1, 2, 3, 4]
    tree = expand_matches(SuffixAutomaton(text), 4, 4, 8)
    first = tree.children()[0]
    assert [tree.tokens[i] for i in first][0] == 50 and tree.scores[first[0]] == CONFIDENCE[4]
    path = [tree.tokens[i] for i in tree.path(max(range(len(tree)), key=lambda i: tree.depths[i]))]
    assert path[:4] == [4, 50, 51, 52]


def test_disagreeing_matches_become_branches_by_count() -> None:
    text = [5, 6, 1, 9, 5, 6, 2, 8, 5, 6, 1, 7, 5, 6]
    tree = expand_matches(SuffixAutomaton(text), 6, 8, 1)
    scores = {tree.tokens[i]: tree.scores[i] for i in tree.children()[0]}
    assert set(scores) == {1, 2} and scores[1] == 2 * scores[2] and abs(sum(scores.values()) - CONFIDENCE[2]) < 1e-12


def test_shorter_matches_add_what_the_longest_never_saw() -> None:
    text = [1, 2, 30, 8, 2, 40, 9, 1, 2]
    tree = expand_matches(SuffixAutomaton(text), 2, 8, 1)
    scores = {tree.tokens[i]: tree.scores[i] for i in tree.children()[0]}
    assert set(scores) == {30, 40} and scores[30] > scores[40]


def test_a_period_is_continued_past_the_end_of_the_text() -> None:
    tree = expand_matches(SuffixAutomaton([1, 2, 3] * 4), 3, 16, 16)
    deepest = max(range(len(tree)), key=lambda i: tree.depths[i])
    assert [tree.tokens[i] for i in tree.path(deepest)[1:]] == ([1, 2, 3] * 6)[:16]


def test_repetitive_text_stays_cheap() -> None:
    automaton = SuffixAutomaton([7] * 5_000)
    assert automaton.length[automaton.link[automaton.last]] == 4_999 and len(automaton.next) == 5_001
    chain = TokenTree.chain([7] * 9, "suffix")
    assert expand_matches(automaton, 7, 8, 8) == replace(chain, scores=(1.0,) + (CONFIDENCE[-1],) * 8)


def test_state_is_per_request_and_dropped_at_the_end() -> None:
    drafter = SuffixDrafter()
    drafter.begin(1, [1, 2, 3, 4])
    drafter.begin(2, [1, 2, 9, 4])
    drafter.observe(1, [1, 2], None)
    drafter.observe(2, [1, 2], None)
    ask = [DraftRequest(request, 2, 1, 1, GREEDY) for request in (1, 2, 3)]
    assert [tree.tokens for tree in drafter.propose(ask)] == [(2, 3), (2, 9), (2,)]
    drafter.end(1)
    drafter.observe(1, [5], None)
    assert [tree.tokens for tree in drafter.propose(ask)] == [(2,), (2, 9), (2,)]
    drafter.begin(3, [])
    assert len(drafter.propose(ask)[2]) == 1

"""Acceptance with the real noise: greedy paths, seeds, lazy laws, refusals, and a chi-square over 20,000 draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexspec.errors import EngineError
from flexspec.runtime.acceptance import accept
from flexspec.runtime.acceptance.accept import RULES, Accepted, accept_greedy, accept_sampled, choose_method
from flexspec.runtime.acceptance.noise import DraftNoise, Purpose, RoundNoise, draft_child, draw_token, stream
from flexspec.runtime.acceptance.transforms import target_law
from flexspec.sampling import SamplingParams
from flexspec.tree import TokenTree

V = 5
DRAWS = 20_000
LOGITS = np.random.default_rng(7).normal(0.0, 1.2, V).astype(np.float32)  # the same at every node
DRAFT = target_law(np.random.default_rng(8).normal(0.0, 1.2, V).astype(np.float32), SamplingParams(temperature=1.0))
PARAMS = SamplingParams(temperature=0.9, top_k=4)


def test_greedy_takes_the_longest_argmax_path() -> None:
    #        0 -> 1(5), 2(6); 2 -> 3(7), 4(8); 4 -> 5(9)
    tree = TokenTree((1, 5, 6, 7, 8, 9), (-1, 0, 0, 2, 2, 4))
    assert accept_greedy(tree, np.array([6, 0, 8, 0, 9, 3], np.int32)) == Accepted((0, 2, 4, 5), 3)
    assert accept_greedy(tree, np.array([6, 0, 8, 0, 7, 3], np.int32)) == Accepted((0, 2, 4), 7)
    assert accept_greedy(tree, np.array([4, 0, 8, 0, 9, 3], np.int32)) == Accepted((0,), 4)
    assert Accepted((0, 2, 4), 7).tokens(tree) == [6, 8, 7]
    assert accept_greedy(TokenTree.root_only(3), np.array([2], np.int32)) == Accepted((0,), 2)


def test_greedy_looks_below_every_sibling_with_the_right_token() -> None:
    tree = TokenTree((1, 5, 5, 6), (-1, 0, 0, 2))
    assert accept_greedy(tree, np.array([5, 6, 6, 0], np.int32)) == Accepted((0, 2, 3), 0)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    size = draw(st.integers(1, 12))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]
    return TokenTree(tuple(draw(st.integers(0, V - 1)) for _ in range(size)), tuple(parents))


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(0, 2**32 - 1), st.sampled_from(["match", "traversal"]))
def test_temperature_zero_is_the_greedy_path(tree: TokenTree, seed: int, method: accept.Method) -> None:
    rows: dict[tuple[int, ...], np.ndarray] = {}
    for node in range(len(tree)):  # equal prefixes have equal logits, as an LLM's have
        path = tuple(tree.tokens[at] for at in tree.path(node))
        rows.setdefault(path, np.random.default_rng([seed, *path]).normal(size=V).astype(np.float32))
    logits_TV = np.stack([rows[tuple(tree.tokens[at] for at in tree.path(node))] for node in range(len(tree))])
    greedy = accept_greedy(tree, logits_TV.argmax(1).astype(np.int32)).tokens(tree)
    sampled = accept_sampled(tree, logits_TV, SamplingParams(temperature=0.0), seed, 9, method).tokens(tree)
    assert sampled == greedy


def stream_of(tree_of, seed: int, length: int, prompt: int = 3) -> list[int]:
    """Tokens of a request whose target depends on the last token only, drafted by ``tree_of(last, round)``."""
    table = np.random.default_rng(1).normal(0.0, 1.5, (V, V)).astype(np.float32)
    tokens = [0]
    while len(tokens) <= length:
        tree = tree_of(tokens[-1], len(tokens))
        rows = table[list(tree.tokens)]
        accepted = accept_sampled(tree, rows, PARAMS, seed, prompt + len(tokens), "match")
        tokens += accepted.tokens(tree)
    return tokens[1 : length + 1]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**64 - 2])
def test_match_gives_the_same_tokens_whatever_is_drafted(seed) -> None:
    off = stream_of(lambda last, at: TokenTree.root_only(last), seed, 60)
    chain = stream_of(lambda last, at: TokenTree.chain([last, (last + at) % V, at % V]), seed, 60)
    wide = stream_of(
        lambda last, at: TokenTree((last, 0, 1, 2, 3, 4, *range(V)), (-1, 0, 0, 0, 0, 0, *[1 + at % V] * V)), seed, 60
    )
    assert off == chain == wide
    assert off != stream_of(lambda last, at: TokenTree.root_only(last), seed + 1, 60)


def test_laws_are_computed_for_visited_nodes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(accept, "target_law", lambda row, params: seen.append(1) or target_law(row, params))
    tree = TokenTree((0, 1, 2, 3, 4), (-1, 0, 0, 1, 2))
    rows = np.full((5, V), -np.inf, np.float32)
    rows[:, 0] = 0.0  # every draft has probability 0
    for method in ("match", "traversal"):
        seen.clear()
        assert accept_sampled(tree, rows, SamplingParams(temperature=1.0), 1, 1, method).nodes == (0,)
        assert len(seen) == 1


def test_only_a_visited_row_without_numbers_ends_the_request() -> None:
    rows = np.zeros((2, V), np.float32)
    rows[1] = np.nan
    params = SamplingParams(temperature=0.0)
    assert accept_sampled(TokenTree.chain([0, 4]), rows, params, 1, 1).nodes == (0,)
    assert accept_sampled(TokenTree.chain([0, 0]), rows, params, 1, 1) == Accepted((0, 1), None)
    with pytest.raises(EngineError, match="FS601"):
        accept_sampled(TokenTree.chain([0, 0]), rows, params, 1, 1, "traversal")


def test_the_default_rule() -> None:
    assert choose_method(TokenTree.chain([0, 1])) == "match"
    assert choose_method(TokenTree((0, 1), (-1, 0), laws={1: DRAFT})) == "traversal"


@pytest.mark.parametrize(
    ("tree", "method", "why"),
    [
        (TokenTree.chain([0, 1]), "mss", "law of every drafted node"),
        (TokenTree((0, 1, 2), (-1, 0, 0), laws={1: DRAFT}), "mss", "law of every drafted node"),
        (TokenTree((0, 1, 2), (-1, 0, 0), laws={1: DRAFT}), "traversal", "covers a deterministic sibling"),
        (TokenTree((0, 1), (-1, 0), laws={1: np.eye(V)[2]}), "traversal", "can't have been drawn"),
        (TokenTree((0, 1), (-1, 0), laws={1: DRAFT[:3]}), "mss", "over V"),
        (TokenTree((0, 1), (-1, 0), laws={1: DRAFT * 0.7}), "mss", "not normalised"),
        (TokenTree((0, 1), (-1, 0), laws={1: DRAFT * 0.7}), "traversal", "not normalised"),
        (TokenTree((0, V), (-1, 0)), "match", "outside the LLM's vocabulary"),
    ],
)
def test_what_would_not_be_exact_is_refused(tree: TokenTree, method: accept.Method, why: str) -> None:
    rows = np.zeros((len(tree), V), np.float32)
    rows[:, 1] = -1.0
    with pytest.raises(AssertionError, match=why):
        for seed in range(20):  # a draft law is checked when it is used
            accept_sampled(tree, rows, SamplingParams(temperature=1.0), seed, 1, method)


# Chi-square: pairs of tokens of one round, real streams, one seed a draw.


def iid_tree(noise: DraftNoise) -> TokenTree:
    tokens = tuple(noise.draw(DRAFT, 0) for _ in range(3))
    return TokenTree((0, *tokens), (-1, 0, 0, 1), laws=dict.fromkeys((1, 2, 3), DRAFT))


def mixed_tree(noise: DraftNoise) -> TokenTree:
    kept = int(DRAFT.argmax())
    tokens, laws = [0, kept], {}
    for node, depth in ((2, 0), (3, 1)):
        child = draft_child(DRAFT, [kept] if depth == 0 else [], noise, depth)
        assert child is not None
        tokens.append(child[0])
        laws[node] = child[1]
    return TokenTree(tuple(tokens), (-1, 0, 0, 2), laws=laws)


def fixed_tree(noise: DraftNoise) -> TokenTree:
    return TokenTree((0, 1, 2, 1), (-1, 0, 0, 2))


def chi_square_p(tree_of, rule, draws=DRAWS, round_noise=RoundNoise) -> float:
    """p-value of the first two tokens against the target law (the second drawn by itself where a round gave one)."""
    law = target_law(LOGITS, PARAMS)
    counts = np.zeros((V, V))
    for seed in range(draws):
        tree = tree_of(DraftNoise(seed, 11))
        tokens = rule(tree, lambda node: law, round_noise(seed, 11)).tokens(tree)
        counts[tokens[0], tokens[1] if len(tokens) > 1 else RoundNoise(seed, 12).draw(law, 0)] += 1
    expected = np.outer(law, law) * draws
    assert not counts[expected == 0].any()
    used = expected > 0
    statistic = float(((counts - expected)[used] ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - 1
    # Wilson-Hilferty: the cube root of chi-square / freedom is close to normal
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return math.erfc(z / math.sqrt(2)) / 2


@pytest.mark.slow(reason="tens of thousands of draws a case: 20 s together")
@pytest.mark.parametrize(
    ("tree_of", "method"),
    [(fixed_tree, "match"), (iid_tree, "match"), (iid_tree, "mss"), (iid_tree, "traversal"), (mixed_tree, "traversal")],
)
def test_real_noise_gives_the_target_law(tree_of, method) -> None:
    assert chi_square_p(tree_of, RULES[method]) > 1e-3


class OneStream:
    """The fault of vllm#47386: drafting, accepting and sampling read one stream from its start."""

    def __init__(self, seed: int, position: int) -> None:
        self.numbers = stream(seed, Purpose.DRAFT, position)

    def accepts(self, chance: float) -> bool:
        return self.numbers.random() < chance

    def draw(self, law_V: np.ndarray, depth: int) -> int:
        return draw_token(law_V, self.numbers.random())


@pytest.mark.parametrize("method", ["mss", "traversal"])
def test_shared_noise_is_seen(method) -> None:
    assert chi_square_p(iid_tree, RULES[method], 3_000, OneStream) < 1e-12

"""Trie union, path survival and the cut, over random trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexspec.runtime.drafters.merge import (
    MAX_SCORE,
    best_chain,
    merge_trees,
    most_promising,
    path_survival,
    take_nodes,
)
from flexspec.tree import TokenTree


@st.composite
def trees(draw: st.DrawFn, source: str = "a") -> TokenTree:
    """A tree without equal siblings, root token 0."""
    tokens, parents, scores = [0], [-1], [1.0]
    used: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, 12))):
        key = (draw(st.integers(0, len(tokens) - 1)), draw(st.integers(1, 4)))
        if key not in used:
            used.add(key)
            parents.append(key[0])
            tokens.append(key[1])
            scores.append(draw(st.sampled_from([0.0, 0.1, 0.5, 0.5, 0.9, 1.0])))
    return TokenTree(tuple(tokens), tuple(parents), ("root",) + (source,) * (len(tokens) - 1), tuple(scores))


def sequences(tree: TokenTree) -> dict[tuple[int, ...], int]:
    """Each node's token path from the root."""
    return {tuple(tree.tokens[node] for node in tree.path(i)): i for i in range(len(tree))}


@given(trees("a"), trees("b"), trees("c"))
def test_merge_is_exactly_the_union(a: TokenTree, b: TokenTree, c: TokenTree) -> None:
    """SpecInfer definition 3.2, with the credit and the combined score of every node."""
    merged = merge_trees([a, b, c])
    found = sequences(merged)
    assert len(found) == len(merged), "equal sequences are one node"
    assert set(found) == set(sequences(a)) | set(sequences(b)) | set(sequences(c))
    for path, node in found.items():
        if len(path) == 1:
            continue
        owners = [
            (name, tree.scores[sequences(tree)[path]])
            for name, tree in zip("abc", (a, b, c), strict=True)
            if path in sequences(tree)
        ]
        assert merged.sources[node] == "+".join(name for name, _ in owners)
        if len(owners) == 1:
            assert merged.scores[node] == owners[0][1]
        else:
            assert merged.scores[node] <= MAX_SCORE
            assert merged.scores[node] == pytest.approx(min(1 - np.prod([1 - s for _, s in owners]), MAX_SCORE))


@given(trees("a"), trees("b"))
def test_merge_is_deterministic_and_keeps_a_lone_tree(a: TokenTree, b: TokenTree) -> None:
    assert merge_trees([a, b]) == merge_trees([a, b])
    assert merge_trees([a]) is a
    assert set(sequences(merge_trees([a, b]))) == set(sequences(merge_trees([b, a])))
    assert set(sequences(merge_trees([a, a]))) == set(sequences(a))


def test_trees_with_sampled_nodes_are_not_merged() -> None:
    sampled = TokenTree((0, 1), (-1, 0), ("root", "ssm"), (1.0, 0.5), {1: np.array([0.0, 1.0])})
    assert merge_trees([sampled]) is sampled
    with pytest.raises(AssertionError, match="sampled nodes"):
        merge_trees([sampled, TokenTree.root_only(0)])


@given(trees(), st.integers(0, 14), st.integers(0, 5))
def test_cut_is_closed_ordered_bounded_and_best(tree: TokenTree, nodes: int, depth: int) -> None:
    survival = path_survival(tree)
    kept = most_promising(tree, survival, nodes, depth)
    shallow = [i for i in range(1, len(tree)) if tree.depths[i] <= depth]
    assert len(kept) == min(nodes, len(shallow)) and set(kept) <= set(shallow)
    for n in range(len(kept) + 1):
        assert all(tree.parents[i] in (0, *kept[:n]) for i in kept[:n]), "every prefix is closed under ancestors"
    left = [survival[i] for i in shallow if i not in kept]
    assert not kept or not left or min(survival[i] for i in kept) >= max(left)
    cut = take_nodes(tree, kept)
    assert set(sequences(cut)) == {path for path, i in sequences(tree).items() if i in kept or i == 0}
    assert all(cut.parents[i] < i for i in range(len(cut))) and cut.tokens[0] == tree.tokens[0]


@given(trees(), st.integers(0, 12))
def test_a_larger_budget_only_adds(tree: TokenTree, nodes: int) -> None:
    survival = path_survival(tree)
    assert most_promising(tree, survival, nodes, 9) == most_promising(tree, survival, nodes + 1, 9)[:nodes]


@given(trees())
def test_survival_is_the_product_along_the_path(tree: TokenTree) -> None:
    for i, chance in enumerate(path_survival(tree)):
        assert chance == pytest.approx(np.prod([tree.scores[node] for node in tree.path(i)]))


@given(trees(), st.integers(0, 6))
def test_best_chain_takes_the_best_child_everywhere(tree: TokenTree, depth: int) -> None:
    survival = path_survival(tree)
    chain = best_chain(tree, survival, depth)
    node = 0
    for child in chain:
        siblings = tree.children()[node]
        assert child == max(siblings, key=lambda i: (survival[i], -i))
        node = child
    assert len(chain) <= depth and (len(chain) == depth or not tree.children()[node])
    assert [len(children) for children in take_nodes(tree, chain).children()] == [1] * len(chain) + [0]


def test_taking_nodes_moves_laws_with_their_nodes() -> None:
    law = np.array([0.0, 0.5, 0.5])
    tree = TokenTree((0, 1, 2, 1), (-1, 0, 0, 2), ("root", "a", "a", "a"), (1.0, 0.5, 0.4, 0.3), {3: law})
    cut = take_nodes(tree, [2, 3])
    assert cut.tokens == (0, 2, 1) and cut.parents == (-1, 0, 1) and list(cut.laws) == [2] and cut.laws[2] is law

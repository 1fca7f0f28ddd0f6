"""Merges the trees of several drafters: trie union, then the most promising part of it.

Owns the union, path survival and the cut; calibrate.py decides which scores to believe. SpecInfer's merge
(arXiv 2305.09781, definition 3.2): the token sequences of the result are exactly the union of the inputs' sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexspec.tree import TokenTree

MAX_SCORE = 0.98  # two sources that agree are not independent: agreement never becomes certainty


def merge_trees(trees: Sequence[TokenTree]) -> TokenTree:
    """Trie union of deterministic trees with one root.

    A node proposed by several sources scores 1 - prod(1 - score), capped, and names them all ("suffix+ngram", in the
    order of ``trees``). Nodes keep the order in which they first appear, so parents come before children. A single
    tree passes unchanged, laws included; several with laws are our own bug (acceptance would not be exact).
    """
    if len(trees) == 1:
        return trees[0]
    assert len({tree.tokens[0] for tree in trees}) == 1, "trees of one request share their root"
    assert not any(tree.laws for tree in trees), "sampled nodes cannot be merged: their laws would be wrong"
    tokens, parents, sources, scores = [trees[0].tokens[0]], [-1], ["root"], [1.0]
    index: dict[tuple[int, int], int] = {}
    for tree in trees:
        place = [0] * len(tree)
        for i in range(1, len(tree)):
            key = (place[tree.parents[i]], tree.tokens[i])
            node = index.get(key)
            if node is None:
                node = index[key] = len(tokens)
                tokens.append(key[1])
                parents.append(key[0])
                sources.append(tree.sources[i])
                scores.append(tree.scores[i])
            else:
                sources[node] = _credit(sources[node], tree.sources[i])
                scores[node] = min(1.0 - (1.0 - scores[node]) * (1.0 - tree.scores[i]), MAX_SCORE)
            place[i] = node
    return TokenTree(tuple(tokens), tuple(parents), tuple(sources), tuple(scores))


def _credit(have: str, more: str) -> str:
    names = have.split("+")
    return "+".join(names + [name for name in more.split("+") if name not in names])


def path_survival(tree: TokenTree, scores: Sequence[float] | None = None) -> list[float]:
    """Chance that each node is committed: the product of conditional ``scores`` (default: the claimed ones) to it."""
    chances = tree.scores if scores is None else scores
    survival = [1.0] * len(tree)
    for i, parent in enumerate(tree.parents):
        if i:
            survival[i] = survival[parent] * min(max(chances[i], 0.0), 1.0)
    return survival


def most_promising(tree: TokenTree, survival: Sequence[float], max_nodes: int, max_depth: int) -> list[int]:
    """Indices of the drafted nodes to keep, best first: at most ``max_nodes``, none deeper than ``max_depth``.

    Any prefix of the list is closed under ancestors, as survival never rises along a path and ties go to the lower
    index, which is the parent's.
    """
    depths = tree.depths
    shallow = [i for i in range(1, len(depths)) if depths[i] <= max_depth]
    return sorted(shallow, key=lambda i: (-survival[i], i))[: max(max_nodes, 0)]


def best_chain(tree: TokenTree, survival: Sequence[float], max_depth: int) -> list[int]:
    """Indices of the path that takes the most promising child at each node, root excluded."""
    best: dict[int, int] = {}
    for i in range(1, len(tree)):
        parent = tree.parents[i]
        if parent not in best or survival[i] > survival[best[parent]]:
            best[parent] = i
    chain: list[int] = []
    node = 0
    while node in best and len(chain) < max_depth:
        node = best[node]
        chain.append(node)
    return chain


def take_nodes(tree: TokenTree, drafted: Sequence[int]) -> TokenTree:
    """The tree of the root and the nodes ``drafted`` (closed under ancestors), in the tree's own order."""
    if len(drafted) == len(tree) - 1:
        return tree
    nodes = [0, *sorted(drafted)]
    place = {node: i for i, node in enumerate(nodes)}
    return TokenTree(
        tuple([tree.tokens[i] for i in nodes]),
        (-1, *[place[tree.parents[i]] for i in nodes[1:]]),
        tuple([tree.sources[i] for i in nodes]),
        tuple([tree.scores[i] for i in nodes]),
        {place[i]: law for i, law in tree.laws.items() if i in place},
    )

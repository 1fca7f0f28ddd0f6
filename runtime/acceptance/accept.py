"""Acceptance: which path of a verified token tree is taken, and the one token after it.

Owns the rules; docs/design/acceptance.md has their mathematics. Laws come from transforms.py, chance from noise.py. A
rule looks at a node's law only when it visits the node. Only runtime/engine/commit.py appends to a sequence.

Legend: T nodes of the tree, V vocabulary. Row i of an array over T belongs to node i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import EngineError
from flexspec.runtime.acceptance.noise import Decisions, RoundNoise
from flexspec.runtime.acceptance.transforms import LawV, target_law
from flexspec.sampling import SamplingParams
from flexspec.tree import TokenTree

LawOf = Callable[[int], LawV]  # node -> target law of the token after it
Method = Literal["match", "mss", "traversal"]

# A residual below this is rounding: the rejection that led to it has true probability 0. Dividing by it gives NaN.
_TINY = 1e-15


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a round may commit."""

    nodes: tuple[int, ...]  # the accepted path, root first
    next_token: int | None  # follows the path's last node and is not in the tree; None: its row is not finite

    @property
    def sound(self) -> bool:
        return self.next_token is not None

    def tokens(self, tree: TokenTree) -> list[int]:
        """The tokens this round offers to commit: those of the path below the root, then ``next_token``."""
        path = [tree.tokens[node] for node in self.nodes[1:]]
        return path if self.next_token is None else [*path, self.next_token]


def accept_greedy(tree: TokenTree, argmax_T: NDArray[np.int32]) -> Accepted:
    """The longest path on which every token is the LLM's argmax at its parent; the lowest node wins a tie.

    An argmax of -1 is that of a row which is not finite.
    """
    assert len(argmax_T) == len(tree), "one argmax a node"
    depth_T = [0] + [-1] * (len(tree) - 1)  # -1: off the path
    best = 0
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if depth_T[parent] >= 0 and tree.tokens[node] == argmax_T[parent]:
            depth_T[node] = depth_T[parent] + 1
            best = node if depth_T[node] > depth_T[best] else best
    following = int(argmax_T[best])
    return Accepted(tuple(tree.path(best)), following if following >= 0 else None)


def choose_method(tree: TokenTree) -> Method:
    """The exact rule that is expected to accept most.

    Deterministic drafts: "match", because no exact rule accepts a node more often than the LLM takes its path, and
    "match" accepts each exactly that often. Trees with sampled nodes: "traversal".
    """
    return "traversal" if tree.laws else "match"


def accept_sampled(
    tree: TokenTree,
    logits_TV: NDArray[np.float32],
    params: SamplingParams,
    seed: int,
    position: int,
    method: Method | None = None,
) -> Accepted:
    """Accept so that the committed tokens follow the target law of ``params`` exactly, whatever was drafted.

    ``position`` is the index in the sequence of the token after the root (= tokens committed so far). A visited row of
    logits with NaN or only -inf ends the path of rule "match" and is an EngineError of the others. Asserts that
    ``method`` is exact for this tree.
    """
    assert logits_TV.shape[0] == len(tree), "one row of logits a node"
    method = method or choose_method(tree)
    check_exact(tree, logits_TV.shape[1], method)
    seen: dict[int, LawV] = {}

    def law_of(node: int) -> LawV:
        if node not in seen:
            seen[node] = target_law(logits_TV[node], params)
        return seen[node]

    return RULES[method](tree, law_of, RoundNoise(seed, position))


def check_exact(tree: TokenTree, vocab_size: int, method: Method) -> None:
    """Assert what ``method`` needs of the tree to be exact; a failure is a drafter's bug, not the user's."""
    assert all(0 <= token < vocab_size for token in tree.tokens), "a token outside the LLM's vocabulary"
    if method == "match":
        return
    for node, law_V in tree.laws.items():
        assert 0 < node < len(tree) and law_V.shape == (vocab_size,), "a law is of a drafted node, over V"
        assert law_V[tree.tokens[node]] > 0.0, f"node {node} can't have been drawn from its law"
    if method == "mss":
        assert len(tree.laws) == len(tree) - 1, "mss needs the law of every drafted node"
        return
    for siblings in tree.children():
        fixed = [tree.tokens[node] for node in siblings if node not in tree.laws]
        for node in siblings:
            # If both tokens were equal, a drafter would merge the two nodes: a draw dropped because of its outcome.
            assert node not in tree.laws or not tree.laws[node][fixed].any(), (
                f"node {node} was drawn from a law that covers a deterministic sibling"
            )


def _match(tree: TokenTree, law_of: LawOf, noise: Decisions) -> Accepted:
    """Draw the LLM's own token and follow it while the tree has it. Exact for any drafts."""
    children = tree.children()
    frontier = [0]  # siblings with equal tokens are one path as far as the LLM is concerned
    while True:
        node = frontier[0]
        try:
            law_V = law_of(node)
        except EngineError:  # the row is not finite: the path up to it stands, as it would without drafts
            return Accepted(tuple(tree.path(node)), None)
        token = noise.draw(law_V, len(tree.path(node)) - 1)
        frontier = [child for at in frontier for child in children[at] if tree.tokens[child] == token]
        if not frontier:
            return Accepted(tuple(tree.path(node)), token)


def _mss(tree: TokenTree, law_of: LawOf, noise: Decisions) -> Accepted:
    """Multi-step speculative sampling (SpecInfer, arXiv 2305.09781, algorithm 2): children tried in order, top down."""
    children = tree.children()
    path = [0]
    while True:
        law_V = law_of(path[-1])
        for child in children[path[-1]]:
            if noise.accepts(min(1.0, _ratio(tree, child, law_V))):
                path.append(child)
                break
            law_V, _ = _residual(tree, child, law_V, 1.0)
        else:
            return Accepted(tuple(path), noise.draw(law_V, len(path) - 1))


def _traversal(tree: TokenTree, law_of: LawOf, noise: Decisions) -> Accepted:
    """Leaf to root (traversal verification, arXiv 2505.12398) with deterministic children as one-hot laws.

    ``mass[i]``: chance that the path to ``path[i]`` is acceptable. ``residual[i]``: the law there, less what rejected
    children took of it; None until one is rejected, so that a leaf's law is computed only if the path ends there.
    """
    waiting = [sorted(nodes, key=lambda node: node not in tree.laws) for nodes in tree.children()]  # sampled first
    path, mass = [0], [1.0]
    residual: list[LawV | None] = [None]
    while True:
        if waiting[path[-1]]:
            child = waiting[path[-1]][0]
            chance = min(1.0, mass[-1] * _ratio(tree, child, _present(residual[-1], law_of, path[-1])))
            if chance > 0.0:  # at 0 nothing below the child can be accepted: reject it unseen
                path.append(child)
                mass.append(chance)
                residual.append(None)
                continue
        elif len(path) == 1 or noise.accepts(mass[-1]):
            return Accepted(tuple(path), noise.draw(_present(residual[-1], law_of, path[-1]), len(path) - 1))
        else:
            child = path.pop()
            mass.pop()
            residual.pop()
        waiting[path[-1]].remove(child)
        residual[-1], left = _residual(tree, child, _present(residual[-1], law_of, path[-1]), mass[-1])
        mass[-1] = left / (left + (1.0 - mass[-1])) if left else 0.0  # (left + 1) - mass would cancel


def _present(residual_V: LawV | None, law_of: LawOf, node: int) -> LawV:
    return law_of(node) if residual_V is None else residual_V


def _ratio(tree: TokenTree, child: int, law_V: LawV) -> float:
    """Target over draft probability of the child's token; the draft's is 1 for a deterministic child."""
    token = tree.tokens[child]
    return float(law_V[token]) / (float(tree.laws[child][token]) if child in tree.laws else 1.0)


def _residual(tree: TokenTree, child: int, law_V: LawV, mass: float) -> tuple[LawV, float]:
    """([mass * law - child's law]+ normalised, its sum before that). An empty one leaves the law as it is, sum 0."""
    rest_V = law_V * mass
    if child in tree.laws:
        child_law_V = tree.laws[child]
        assert abs(child_law_V.sum() - 1.0) < 1e-9, f"the draft law of node {child} is not normalised"
        rest_V -= child_law_V
        np.maximum(rest_V, 0.0, out=rest_V)
    else:
        rest_V[tree.tokens[child]] = 0.0
    left = float(rest_V.sum())
    if left < _TINY:
        return law_V, 0.0
    rest_V *= 1.0 / left
    return rest_V, left


RULES: dict[Method, Callable[[TokenTree, LawOf, Decisions], Accepted]] = {
    "match": _match,
    "mss": _mss,
    "traversal": _traversal,
}

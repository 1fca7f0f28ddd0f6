"""The growth of an SSM's token tree, level by level, and the rows that must be fed again.

The tree's shape is draft_plan.py's ``Expansion``.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from flexspec.runtime.drafters.merge import most_promising, take_nodes
from flexspec.tree import TokenTree, ancestor_bits


class Growth:
    """One request's tree while it grows.

    An executor's ancestor bits reach only rows of the same step, so a level's step feeds the earlier branching rows
    again, at the same slots. The unbranched ``stem`` below the root needs no bits: its rows, once fed, count as
    context.
    """

    __slots__ = (
        "best",
        "depths",
        "features",
        "laws",
        "level",
        "parents",
        "rows",
        "scores",
        "source",
        "stem",
        "survival",
        "tokens",
    )

    def __init__(self, root_token: int, source: str) -> None:
        self.tokens, self.parents, self.scores = [root_token], [-1], [1.0]
        self.survival, self.depths = [1.0], [0]
        self.laws: dict[int, NDArray[np.float64]] = {}
        self.features: dict[int, NDArray[np.float32]] = {}  # the SSM's output at a fed node: the input of its children
        self.best: list[float] = []  # heap of the highest survivals, for add_promising
        self.level: list[int] = []  # nodes of the newest level
        self.rows: list[int] = []  # fed nodes after the stem, in slot order
        self.stem = 0
        self.source = source

    def add(self, parent: int, token: int, score: float, law: NDArray[np.float64] | None = None) -> None:
        """Add a child to ``parent``; it belongs to the newest level."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.survival.append(self.survival[parent] * score)
        self.depths.append(self.depths[parent] + 1)
        self.level.append(node)
        if law is not None:
            self.laws[node] = law

    def add_promising(self, parent: int, tokens: Sequence[int], scores: Sequence[float], max_nodes: int) -> None:
        """Add the children (falling scores) that may still be among the tree's ``max_nodes`` most promising nodes."""
        above = self.survival[parent]
        for token, score in zip(tokens, scores, strict=True):
            if len(self.best) < max_nodes:
                heappush(self.best, above * score)
            elif above * score > self.best[0]:
                heapreplace(self.best, above * score)
            else:
                return
            self.add(parent, token, score)

    def reached(self, beam: int | None) -> float:
        """Expected number of the newest level's ``beam`` most promising nodes that the text goes through."""
        chances = [self.survival[node] for node in self.level]
        return sum(chances if beam is None else sorted(chances)[-beam:])

    def begin_level(self, beam: int | None) -> list[int]:
        """Nodes of the newest level to extend, the most promising ``beam``; the next ``add`` starts a new level."""
        chosen = self.level
        if beam is not None and len(chosen) > beam:
            chosen = sorted(sorted(chosen, key=lambda i: (-self.survival[i], i))[:beam])
        self.level = []
        return chosen

    def feed(self, chosen: Sequence[int]) -> list[int]:
        """The nodes whose rows the step for ``chosen`` must hold, in slot order after the stem; ``chosen`` last."""
        self.rows.extend(chosen)
        return list(self.rows)

    def settle(self) -> None:
        """After the step: the single row of an unbranched tree becomes part of the stem."""
        if len(self.rows) == 1:
            self.rows.clear()
            self.stem += 1

    def ancestor_bits(self, rows: Sequence[int]) -> list[int]:
        """For each row the bit set of its ancestors-or-self among ``rows``; nodes of the stem have no bit."""
        place = {node: j for j, node in enumerate(rows)}
        return ancestor_bits([place.get(self.parents[node], -1) for node in rows])

    def tree(self, max_nodes: int, max_depth: int) -> TokenTree:
        """The finished tree, cut to its most promising nodes (trees with laws are never cut)."""
        count = len(self.tokens) - 1
        sources = ("root",) + (self.source,) * count
        tree = TokenTree(tuple(self.tokens), tuple(self.parents), sources, tuple(self.scores), self.laws)
        if self.laws:
            assert count <= max_nodes, "a tree with sampled nodes is sized before it is drawn"
            return tree
        return take_nodes(tree, most_promising(tree, self.survival, max_nodes, max_depth))

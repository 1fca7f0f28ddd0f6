"""The token tree: nodes hold tokens, the root (node 0) is the last committed token.

Owns the structure and its derived arrays (depths, ancestor words). Nodes are in topological order: a parent's index is
lower than its children's. Scores, budgets and drafting live in runtime/drafters; acceptance in runtime/accept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenTree:
    """``tokens[i]`` is the token of node i, ``parents[i]`` its parent (``parents[0] == -1``).

    ``sources[i]`` names the drafter that proposed the node ("root" for node 0) and ``scores[i]`` is its claimed chance
    of being accepted given its parent is. ``laws`` maps a node to the law (float64 [V]) its token was really drawn
    from; nodes without one were proposed deterministically (acceptance.md rule 1 or one-hot in traversal).
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    laws: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.tokens and len(self.tokens) == len(self.parents) and self.parents[0] == -1
        assert all(0 <= p < i for i, p in enumerate(self.parents) if i), "parents come before children"

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def root_only(cls, token: int) -> TokenTree:
        return cls((token,), (-1,), ("root",), (1.0,))

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str = "chain") -> TokenTree:
        """Root followed by a path, one child a node."""
        n = len(tokens)
        return cls(tuple(tokens), tuple(range(-1, n - 1)), ("root",) + (source,) * (n - 1), (1.0,) * n)

    def depths(self) -> NDArray[np.int32]:
        """Depth of each node; the root has 0."""
        depth = np.zeros(len(self), np.int32)
        for i in range(1, len(self)):
            depth[i] = depth[self.parents[i]] + 1
        return depth

    def ancestors(self, words: int | None = None) -> NDArray[np.uint64]:
        """[T, W] ancestor-or-self bits: bit j % 64 of word j // 64 in row i says node j is on the path to i."""
        words = words or (len(self) + 63) // 64
        table = np.zeros((len(self), words), np.uint64)
        for i, parent in enumerate(self.parents):
            if i:
                table[i] = table[parent]
            table[i, i // 64] |= np.uint64(1 << (i % 64))
        return table

    def children(self) -> list[list[int]]:
        """For each node its children, in index order."""
        table: list[list[int]] = [[] for _ in self.tokens]
        for i, parent in enumerate(self.parents):
            if i:
                table[parent].append(i)
        return table

    def path(self, node: int) -> list[int]:
        """Node indices from the root to ``node``, both included."""
        nodes = [node]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

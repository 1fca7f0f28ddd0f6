"""The token tree: nodes hold tokens, the root (node 0) is the last committed token.

Owns the structure and what follows from it (depths, ancestor bits). Nodes are in topological order: a parent's index is
lower than its children's. Scores, budgets and drafting live in runtime/drafters; acceptance in runtime/acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Entry i of each tuple is node i's. Depths are computed once, when the tree is made."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # -1 for the root, which is node 0
    sources: tuple[str, ...] = ()  # the drafters that proposed the node ("suffix+ngram"); "root" for node 0
    scores: tuple[float, ...] = ()  # the claimed chance that the node is accepted given that its parent is
    # node -> the law (float64 [V]) from which its token was drawn; a node without one was proposed deterministically
    # (docs/design/acceptance.md rule 1, or one-hot in traversal)
    laws: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    depths: tuple[int, ...] = field(init=False, repr=False, compare=False)  # edges from the root

    def __post_init__(self) -> None:
        assert self.tokens and len(self.tokens) == len(self.parents) and self.parents[0] == -1
        depths = [0]
        for parent in self.parents[1:]:
            assert 0 <= parent < len(depths), "parents come before children"
            depths.append(depths[parent] + 1)
        object.__setattr__(self, "depths", tuple(depths))

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def root_only(cls, token: int) -> TokenTree:
        return cls((token,), (-1,), ("root",), (1.0,))

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str = "chain") -> TokenTree:
        """A root followed by a path."""
        n = len(tokens)
        return cls(tuple(tokens), tuple(range(-1, n - 1)), ("root",) + (source,) * (n - 1), (1.0,) * n)

    def ancestors(self, words: int | None = None) -> NDArray[np.uint64]:
        """[T, W] ancestor-or-self bits: bit j % 64 of word j // 64 in row i says node j is on the path to i."""
        return bit_words(ancestor_bits(self.parents), words or (len(self) + 63) // 64)

    def children(self) -> list[list[int]]:
        """The children of each node, in index order."""
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


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """For each node, the bit set of its ancestors and itself; a negative parent makes a root. Parents come first."""
    bits: list[int] = []
    for node, parent in enumerate(parents):
        bits.append(1 << node if parent < 0 else bits[parent] | 1 << node)
    return bits


def bit_words(bits: Sequence[int], words: int) -> NDArray[np.uint64]:
    """[len(bits), words]: each bit set as 64-bit words, the lowest first."""
    packed = b"".join([row.to_bytes(8 * words, "little") for row in bits])
    return np.frombuffer(packed, "<u8").reshape(len(bits), words).astype(np.uint64)

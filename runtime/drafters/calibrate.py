"""What a drafter's claims are worth, learned from what the verifier accepted.

Owns the acceptance counts per source, depth and claimed score. It reads outcomes and writes nothing back into trees: a
tree keeps its claimed scores, so that an outcome is counted under the claim that was made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection

from flexspec.tree import TokenTree

SCORE_EDGES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
DEPTH_EDGES = (2, 3, 5, 9)  # depths 1 | 2 | 3-4 | 5-8 | 9 and deeper
PRIOR_TRIALS = 8.0  # the claim weighs as much as this many observations
DECAY = 0.998  # of a cell per new observation in it: it remembers about its last 500

_Key = tuple[str, int, int]


class Calibration:
    """Beta-smoothed acceptance rates; starts by believing every claim."""

    def __init__(self) -> None:
        self._cells: dict[_Key, list[float]] = {}  # accepted, tried; both decayed

    def scores(self, tree: TokenTree) -> list[float]:
        """The measured chance of each node given its parent; 1 for the root."""
        measured = map(self.score, tree.sources[1:], tree.depths[1:], tree.scores[1:])
        return [1.0, *measured]

    def score(self, source: str, depth: int, claim: float) -> float:
        """The measured chance of a node that ``source`` proposed at ``depth`` with ``claim``."""
        cell = self._cells.get((source, bisect_right(DEPTH_EDGES, depth), bisect_right(SCORE_EDGES, claim)))
        return claim if cell is None else (cell[0] + PRIOR_TRIALS * claim) / (cell[1] + PRIOR_TRIALS)

    def update(self, tree: TokenTree, accepted_nodes: Collection[int]) -> None:
        """Count one verify pass: only children of the root and of accepted nodes were tested."""
        accepted = set(accepted_nodes) | {0}
        for i in range(1, len(tree)):
            if tree.parents[i] not in accepted:
                continue
            bucket = bisect_right(DEPTH_EDGES, tree.depths[i]), bisect_right(SCORE_EDGES, tree.scores[i])
            key = (tree.sources[i], *bucket)
            cell = self._cells.setdefault(key, [0.0, 0.0])
            cell[0] = cell[0] * DECAY + (i in accepted)
            cell[1] = cell[1] * DECAY + 1.0

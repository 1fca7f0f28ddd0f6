"""A token tree grown best first: the next node is always the one that the text is most likely to reach.

Owns the one heap over tree nodes, for the drafters that run no model. An SSM grows level by level instead (expand.py):
a step of its model serves a whole level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heappushpop
from typing import Any, TypeVar

from flexspec.tree import TokenTree

StateT = TypeVar("StateT")  # what a drafter needs to continue after a node
SuccessorT = TypeVar("SuccessorT", bound=tuple[Any, ...])  # (token, its chance given the node before, ...)


def grow_best_first(
    source: str,
    root: int,
    state: StateT,
    successors: Sequence[SuccessorT],
    expand: Callable[[StateT, SuccessorT], tuple[StateT, Sequence[SuccessorT]]],
    max_nodes: int,
    max_depth: int,
) -> TokenTree:
    """The ``max_nodes`` most likely nodes by path probability, parents first, none deeper than ``max_depth``.

    ``state`` and ``successors`` are the root's; ``expand(state, successor)`` gives those of a child. Successors are in
    falling order of their chances. Ties between paths go by the parent's index, then by rank.
    """
    tokens, parents, scores = [root], [-1], [1.0]
    states, paths, depths = [state], [1.0], [0]
    heap: list[tuple[float, int, int, Sequence[SuccessorT]]] = []  # -path, parent, rank among its siblings, siblings
    newest = (-successors[0][1], 0, 0, successors) if successors and max_depth > 0 else None  # not in the heap yet
    while len(tokens) <= max_nodes:
        if newest is not None:
            path, parent, rank, siblings = heappushpop(heap, newest)  # cheap where a chain continues
        elif heap:
            path, parent, rank, siblings = heappop(heap)
        else:
            break
        successor = siblings[rank]
        score = successor[1]
        depth = depths[parent] + 1
        node = len(tokens)
        tokens.append(successor[0])
        parents.append(parent)
        scores.append(score if score < 1.0 else 1.0)
        paths.append(-path)
        depths.append(depth)
        if rank + 1 < len(siblings):
            heappush(heap, (-paths[parent] * siblings[rank + 1][1], parent, rank + 1, siblings))
        newest = None
        if depth < max_depth and node < max_nodes:
            state, children = expand(states[parent], successor)
            newest = (path * children[0][1], node, 0, children) if children else None
        states.append(state)  # read only for nodes that were expanded
    return TokenTree(tuple(tokens), tuple(parents), ("root",) + (source,) * (len(tokens) - 1), tuple(scores))

"""The dynamic program of the search: the cuts with the least latency when no part may be busier than a limit.

A state is (nodes used of each kind, devices used on the current node, degree of the last stage); its value is a vector
with the least latency for every number of blocks. Equal nodes are counted, not distinguished.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.prices.problem import Pool
from flexspec.compiler.prices.rounds import Cut

Vector = NDArray[np.float64]  # by number of blocks, 0 to N
INF = math.inf


@dataclass(slots=True)
class _Node:
    """One node being filled: latency by (devices used, degree of the last stage), a vector over blocks."""

    before: tuple[int, ...]  # nodes used before it, by pool
    pool: int
    used: dict[tuple[int, int], Vector] = field(default_factory=dict)


class StageProgram:
    """The dynamic program for one limit of the bottleneck."""

    def __init__(
        self,
        pools: tuple[Pool, ...],
        degrees: tuple[int, ...],
        blocks: int,
        costs: Mapping[tuple[int, int, bool, bool], Vector],  # us by (kind, degree, first, last); inf: does not fit
        hop_us: Callable[[int, int, int, bool], float],  # of (kind, source degree, target degree, new node)
        beta: float,  # the limit, in microseconds
        fixed_us: float,  # part of every latency
        rest_us: float = 0.0,  # least time of a block
        ceiling_us: float = INF,  # only latencies below it count
    ) -> None:
        self.pools, self.degrees, self.n, self.costs = pools, degrees, blocks, costs
        self.hop_us, self.beta, self.fixed_us = hop_us, beta, fixed_us
        # The most time a prefix of b blocks may take if the rest, at its fastest, is to stay below the ceiling.
        room = (ceiling_us - fixed_us) * (1 + 1e-12) - (blocks - np.arange(blocks + 1)) * rest_us
        self.room = np.minimum(room, sys.float_info.max)  # inf is never within it
        # earlier[i, j] is the latency at i - j - 1 blocks, inf below 0: a view of one vector that is written once.
        padded = np.full(2 * blocks + 1, INF)
        self.present, step = padded[blocks:], padded.strides[0]
        self.earlier = np.lib.stride_tricks.as_strided(padded[blocks - 1 :], (blocks + 1, blocks), (step, -step))
        self.nodes: dict[tuple[tuple[int, ...], int], _Node] = {}
        self.exits: dict[tuple[int, ...], dict[int, Vector]] = {}  # by nodes used: best latency by last degree
        self.best = INF
        self.end: tuple[_Node, int, int, int] | None = None  # node, devices used before, degree, blocks of the last

    def solve(self) -> tuple[float, tuple[Cut, ...]]:
        zero = (0,) * len(self.pools)
        for nodes in itertools.product(*(range(pool.count + 1) for pool in self.pools)):
            if nodes == zero:
                continue
            exits: dict[int, Vector] = {}
            for k, count in enumerate(nodes):
                before = (*nodes[:k], count - 1, *nodes[k + 1 :])
                if count and (before == zero or before in self.exits):
                    node = self._fill(before, k, before == zero)
                    for (_, degree), vector in node.used.items():
                        exits[degree] = np.minimum(exits[degree], vector) if degree in exits else vector
            if exits and not self._dominated(nodes, exits):
                self.exits[nodes] = exits
        if self.end is None:
            return INF, ()
        return self.best + self.fixed_us, self._trace()

    def _dominated(self, nodes: tuple[int, ...], exits: dict[int, Vector]) -> bool:
        """One node fewer gives the same or better, and allows whatever can follow: this set is dominated."""
        for k, count in enumerate(nodes):
            fewer = self.exits.get((*nodes[:k], count - 1, *nodes[k + 1 :])) if count else None
            if fewer and all(d in fewer and bool(np.all(fewer[d] <= vector)) for d, vector in exits.items()):
                return True
        return False

    def _fill(self, before: tuple[int, ...], k: int, empty: bool) -> _Node:
        pool, node = self.pools[k], _Node(before, k)
        self.nodes[before, k] = node
        for used in range(pool.devices):
            for degree in self.degrees:
                if used + degree > pool.devices:
                    continue
                if empty and used == 0:
                    vector: Vector | None = self.costs[pool.kind, degree, True, False]
                    self._finish(node, used, degree, float(self.costs[pool.kind, degree, True, True][self.n]), self.n)
                else:
                    vector = self._extend(node, used, degree)
                if vector is not None and bool((vector <= self.room).any()):
                    vector = np.where(vector <= self.room, vector, INF)
                    key = (used + degree, degree)
                    node.used[key] = np.minimum(node.used[key], vector) if key in node.used else vector
        return node

    def _extend(self, node: _Node, used: int, degree: int) -> Vector | None:
        """The least latency after one more stage of ``degree``, with ``used`` devices of the node already taken."""
        entry = self._entry(node, used, degree)
        if entry is None or not bool((entry <= self.room).any()):
            return None
        kind = self.pools[node.pool].kind
        last = entry[self.n - 1 :: -1] + self.costs[kind, degree, False, True][1:]
        blocks = int(np.argmin(last)) + 1
        self._finish(node, used, degree, float(last[blocks - 1]), blocks)
        self.present[:] = entry
        added: Vector = (self.earlier + self.costs[kind, degree, False, False][1:]).min(axis=1)
        return added

    def _sources(self, node: _Node, used: int) -> dict[int, Vector]:
        """Latencies before a new stage, by the degree of its predecessor."""
        if used == 0:
            return self.exits.get(node.before, {})
        return {degree: vector for (taken, degree), vector in node.used.items() if taken == used}

    def _hop_us(self, node: _Node, used: int, source: int, degree: int) -> float:
        time = self.hop_us(self.pools[node.pool].kind, source, degree, used == 0)
        return time if time <= self.beta else INF

    def _entry(self, node: _Node, used: int, degree: int) -> Vector | None:
        """The best latency before the stage, including the hop to it."""
        best: Vector | None = None
        for source, vector in self._sources(node, used).items():
            entered = vector + self._hop_us(node, used, source, degree)
            best = entered if best is None else np.minimum(best, entered)
        return best

    def _finish(self, node: _Node, used: int, degree: int, latency: float, blocks: int) -> None:
        if latency < self.best:
            self.best, self.end = latency, (node, used, degree, blocks)

    def _trace(self) -> tuple[Cut, ...]:
        """The cuts of the best plan, found from the last stage backwards."""
        assert self.end is not None
        node, used, degree, blocks = self.end
        cuts: list[Cut] = []
        left = self.n
        while True:
            new_node = used == 0
            left -= blocks
            cuts.append(Cut(self.pools[node.pool].kind, degree, blocks, new_node and left > 0))
            if left == 0:
                return tuple(reversed(cuts))
            source = self._best_source(node, used, degree, left)
            if new_node:
                node = self._node_that_left(node.before, source, left)
                used = next(
                    taken for (taken, d), v in node.used.items()
                    if d == source and v[left] == self.exits[_after(node)][source][left]
                ) - source  # fmt: skip
            else:
                used -= source
            degree = source
            blocks = self._blocks_of(node, used, degree, left)

    def _best_source(self, node: _Node, used: int, degree: int, left: int) -> int:
        sources = self._sources(node, used)
        return min(sources, key=lambda s: float(sources[s][left]) + self._hop_us(node, used, s, degree))

    def _node_that_left(self, nodes: tuple[int, ...], degree: int, left: int) -> _Node:
        """The node filled last on the way to the best exit of ``nodes`` with this degree."""
        best = self.exits[nodes][degree][left]
        for k, count in enumerate(nodes):
            node = self.nodes.get(((*nodes[:k], count - 1, *nodes[k + 1 :]), k)) if count else None
            if node and any(d == degree and v[left] == best for (_, d), v in node.used.items()):
                return node
        raise AssertionError("an exit that no node left")

    def _blocks_of(self, node: _Node, used: int, degree: int, left: int) -> int:
        """Blocks of the stage (not the last one) after which ``left`` blocks are placed."""
        kind = self.pools[node.pool].kind
        if used == 0 and not any(node.before):
            return left
        entry = self._entry(node, used, degree)
        assert entry is not None
        return int(np.argmin(entry[left - 1 :: -1] + self.costs[kind, degree, False, False][1 : left + 1])) + 1


def _after(node: _Node) -> tuple[int, ...]:
    """Nodes used after ``node``."""
    return tuple(count + (k == node.pool) for k, count in enumerate(node.before))

"""What one rank of a plan runs: a graph and a recipe for its weights."""

from __future__ import annotations

from dataclasses import dataclass

from flexspec.compiler.partition.shares import WeightSlice
from flexspec.graph import Graph


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's share of the model.

    The graph's inputs are the step, features if its stage reads them, weights, and caches. In the last stage, its first
    outputs are those of the model's graph (logits, features), uncut on every rank; then come sent values and caches.
    """

    rank: int
    stage: int
    graph: Graph
    weights: tuple[WeightSlice, ...]  # how each weight of the graph is cut from the model's
    results: int  # how many outputs are those of the model's graph

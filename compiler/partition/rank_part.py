"""What one rank of a plan runs: a graph and a recipe for its weights."""

from __future__ import annotations

from dataclasses import dataclass

from flexspec.compiler.partition.shares import WeightSlice
from flexspec.graph import Graph


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's share of the model.

    The graph reads the step, then features if its stage does, weights, caches. It returns, in the last stage, what the
    whole graph does (logits, features), whole on every rank; then the values that it sends; then its caches.
    """

    rank: int
    stage: int  # number of the stage
    graph: Graph
    weights: tuple[WeightSlice, ...]  # how each weight of the graph is cut from the model's
    results: int  # how many outputs are those of the whole graph

"""The one heap over token trees: order, ties, limits."""

from __future__ import annotations

import pytest

from flexspec.runtime.drafters.best_first import grow_best_first
from flexspec.tree import TokenTree


def grow(chances: list[float], nodes: int, depth: int) -> TokenTree:
    """Behind every node come tokens 0, 1, ... with the same falling ``chances``; the root's token is 9."""
    successors = list(enumerate(chances))
    return grow_best_first("toy", 9, None, successors, lambda _, successor: (None, successors), nodes, depth)


def test_the_most_likely_node_comes_next_whatever_its_depth() -> None:
    tree = grow([0.75, 0.25], 5, 8)  # paths 0.75, 0.56, 0.42, 0.32, 0.25
    assert tree.tokens == (9, 0, 0, 0, 0, 1) and tree.parents == (-1, 0, 1, 2, 3, 0)
    assert tree.scores == (1.0, 0.75, 0.75, 0.75, 0.75, 0.25) and tree.sources == ("root",) + ("toy",) * 5


def test_equal_paths_go_by_parent_then_rank() -> None:
    assert grow([0.5, 0.5], 6, 2).parents == (-1, 0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize(("nodes", "depth", "expected"), [(0, 4, 0), (4, 0, 0), (9, 1, 2), (9, 2, 6), (3, 9, 3)])
def test_limits_hold(nodes: int, depth: int, expected: int) -> None:
    tree = grow([0.5, 0.25], nodes, depth)
    assert len(tree) - 1 == expected and max(tree.depths) <= depth


def test_a_chance_above_one_is_claimed_as_one() -> None:
    assert grow([1.25], 1, 1).scores == (1.0, 1.0)


def test_a_node_without_successors_ends_its_path() -> None:
    ends = [(7, 0.5)], [(8, 0.5)], []
    tree = grow_best_first("toy", 9, 0, ends[0], lambda level, _: (level + 1, ends[level + 1]), 9, 9)
    assert tree.tokens == (9, 7, 8)

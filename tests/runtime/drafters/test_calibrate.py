"""Claims become measured rates; only tested nodes count."""

from __future__ import annotations

import random

import pytest

from flexspec.runtime.drafters.calibrate import PRIOR_TRIALS, Calibration
from flexspec.tree import TokenTree

TREE = TokenTree((0, 1, 2, 3, 4), (-1, 0, 0, 1, 3), ("root", "a", "b", "a", "a"), (1.0, 0.6, 0.3, 0.6, 0.6))


def test_claims_are_believed_until_something_is_known() -> None:
    assert Calibration().scores(TREE) == list(TREE.scores)


def smoothed(claim: float, accepted: bool) -> float:
    """The measured chance after one outcome: the claim weighs as much as PRIOR_TRIALS others."""
    return (PRIOR_TRIALS * claim + accepted) / (PRIOR_TRIALS + 1.0)


@pytest.mark.parametrize(
    ("accepted", "scores"),
    [
        ([0, 1], [1.0, smoothed(0.6, True), smoothed(0.3, False), smoothed(0.6, False), 0.6]),  # node 3 was rejected
        ([0], [1.0, smoothed(0.6, False), smoothed(0.3, False), 0.6, 0.6]),
    ],
    ids=["a child of the root", "nothing"],
)
def test_only_children_of_accepted_nodes_are_booked(accepted: list[int], scores: list[float]) -> None:
    calibration = Calibration()
    calibration.update(TREE, accepted)
    assert calibration.scores(TREE) == pytest.approx(scores)


@pytest.mark.parametrize("truth", [0.02, 0.35, 0.97])
def test_scores_go_to_the_true_rate(truth: float) -> None:
    rng = random.Random(1)
    calibration = Calibration()
    tree = TokenTree((0, 1), (-1, 0), ("root", "a"), (1.0, 0.6))
    for _ in range(2_000):
        calibration.update(tree, [0, 1] if rng.random() < truth else [0])
    assert calibration.scores(tree)[1] == pytest.approx(truth, abs=0.06)


def test_old_outcomes_fade() -> None:
    calibration = Calibration()
    tree = TokenTree((0, 1), (-1, 0), ("root", "a"), (1.0, 0.6))
    for _ in range(3_000):
        calibration.update(tree, [0, 1])
    for _ in range(1_500):
        calibration.update(tree, [0])
    assert calibration.scores(tree)[1] < 0.1


def test_sources_depths_and_claims_are_apart() -> None:
    calibration = Calibration()
    for _ in range(200):
        calibration.update(TokenTree((0, 1), (-1, 0), ("root", "a"), (1.0, 0.6)), [0])
    other = TokenTree((0, 1, 2, 3), (-1, 0, 0, 2), ("root", "a+b", "a", "a"), (1.0, 0.6, 0.05, 0.6))
    assert calibration.scores(other) == list(other.scores)

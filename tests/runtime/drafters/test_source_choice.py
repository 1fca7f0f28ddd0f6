"""The choice between drafting with and without the SSMs follows the measured rate, and keeps looking."""

from __future__ import annotations

import pytest

from flexspec.runtime.drafters.source_choice import BLOCK_ROUNDS, EXPLORE_EVERY, SourceChoice


def run(choice: SourceChoice, rounds: int, seconds_with: float, seconds_without: float) -> list[bool]:
    """Rounds of 3 tokens with the SSMs and 2 without; returns which way each went."""
    ways = []
    for _ in range(rounds):
        ways.append(choice.with_models)
        if choice.with_models:
            choice.record(3, seconds_with)
        else:
            choice.record(2, seconds_without)
    return ways


def test_both_ways_get_a_block_first() -> None:
    ways = run(SourceChoice(), 2 * BLOCK_ROUNDS, 1.0, 1.0)
    assert ways == [True] * BLOCK_ROUNDS + [False] * BLOCK_ROUNDS


@pytest.mark.parametrize(("seconds_with", "better"), [(1.2, True), (1.8, False)])
def test_the_faster_way_gets_all_but_the_looks(seconds_with: float, better: bool) -> None:
    rounds = 20 * EXPLORE_EVERY * BLOCK_ROUNDS
    ways = run(SourceChoice(), rounds, seconds_with, 1.0)
    assert ways.count(better) == pytest.approx(rounds * (1 - 1 / EXPLORE_EVERY), rel=0.02)


def test_a_change_of_the_machine_is_noticed() -> None:
    choice = SourceChoice()
    run(choice, 10 * EXPLORE_EVERY * BLOCK_ROUNDS, 1.2, 1.0)
    ways = run(choice, 10 * EXPLORE_EVERY * BLOCK_ROUNDS, 3.0, 1.0)
    assert ways[-BLOCK_ROUNDS * (EXPLORE_EVERY - 1) :].count(False) > ways[-BLOCK_ROUNDS * (EXPLORE_EVERY - 1) :].count(
        True
    )


def test_no_time_is_no_rate() -> None:
    assert SourceChoice().rate(False) == 0.0

"""Node counts by expected tokens over cost, and the watcher that gives up and comes back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexspec.runtime.drafters.budget import (
    MAX_RETRY_ROUNDS,
    RETRY_ROUNDS,
    WINDOW_ROUNDS,
    SpeculationSwitch,
    StepCost,
    choose_budget,
)

MEASURED = StepCost.from_points([(1, 20.0), (8, 21.8), (16, 23.4), (32, 27.4)])
falling = st.lists(st.floats(0.0, 1.0), max_size=5).map(lambda chances: sorted(chances, reverse=True))


def test_step_cost_is_relative_interpolated_and_never_falls() -> None:
    assert MEASURED(1) == 1.0 and MEASURED(8) == pytest.approx(1.09) and MEASURED(12) == pytest.approx(1.13)
    assert MEASURED(64) == pytest.approx(2 * 1.37)
    noisy = StepCost.from_points([(1, 2.0), (4, 1.8), (8, 2.2)])
    assert [noisy(n) for n in (1, 2, 4, 8)] == pytest.approx([1.0, 1.0, 1.0, 1.1])


@given(st.lists(falling, min_size=1, max_size=3), st.floats(0.0, 2.0), st.floats(0.0, 0.3))
def test_no_other_split_earns_more(survival: list[list[float]], draft: float, slope: float) -> None:
    cost = StepCost.from_points([(1, 1.0), (4, 1.0 + slope), (20, 1.0 + 9 * slope)])
    budget = choose_budget(survival, cost, draft)

    def rate(nodes: tuple[int, ...]) -> float:
        tokens = len(survival) + sum(sum(chances[:n]) for chances, n in zip(survival, nodes, strict=True))
        return tokens / (cost(len(survival) + sum(nodes)) + draft)

    best = max(rate(nodes) for nodes in itertools.product(*(range(len(chances) + 1) for chances in survival)))
    assert rate(budget.nodes) == pytest.approx(best) and budget.tokens_per_cost == pytest.approx(best)


@pytest.mark.parametrize(
    ("survival", "points", "nodes"),
    [
        ([[0.02, 0.01]], [(1, 1.0), (2, 1.5)], (0,)),
        ([[0.9, 0.1, 0.05]], [(1, 1.0), (2, 1.1), (3, 1.4)], (1,)),
        ([[0.5] * 7], [(1, 20.0), (8, 21.8)], (7,)),
        ([], [(1, 1.0)], ()),
    ],
    ids=["off", "chain", "tree", "no requests"],
)
def test_off_chain_and_tree_can_each_win(
    survival: list[list[float]], points: list[tuple[int, float]], nodes: tuple[int, ...]
) -> None:
    assert choose_budget(survival, StepCost.from_points(points)).nodes == nodes


def test_the_promising_request_gets_the_rows() -> None:
    steep = StepCost.from_points([(2, 1.0), (4, 1.3), (10, 3.0)])
    assert choose_budget([[0.9, 0.8], [0.1, 0.1]], steep).nodes == (2, 0)


def run_rounds(watch: SpeculationSwitch, rounds: int, tokens: int, seconds: float = 1.0, requests: int = 1) -> None:
    for _ in range(rounds):
        watch.record_round(requests, tokens, seconds)


def test_too_few_tokens_for_a_whole_window_switch_it_off() -> None:
    watch = SpeculationSwitch()
    run_rounds(watch, WINDOW_ROUNDS - 1, 1)
    assert watch.enabled
    run_rounds(watch, 1, 1)
    assert not watch.enabled and "1.00 tokens a round" in watch.reason


def test_the_ratio_is_pooled_over_requests() -> None:
    watch = SpeculationSwitch()
    for _ in range(WINDOW_ROUNDS // 20):
        watch.record_round(10, 10, 1.0)
        watch.record_round(10, 11, 1.0)  # 1.05 in all
    assert watch.enabled
    for _ in range(WINDOW_ROUNDS // 40):
        watch.record_round(39, 39, 1.0)
        watch.record_round(1, 2, 1.0)  # a mean of ratios would say 1.5
    assert not watch.enabled and "1.02 tokens a round" in watch.reason


def test_measured_times_switch_it_off_although_tokens_come() -> None:
    watch = SpeculationSwitch()
    watch.record_plain(1, 1.0)
    run_rounds(watch, WINDOW_ROUNDS, 2, seconds=1.9)
    assert watch.enabled
    run_rounds(watch, WINDOW_ROUNDS, 2, seconds=2.1)
    assert not watch.enabled and "times the speed of plain decoding" in watch.reason


def test_it_comes_back_and_waits_longer_each_time_it_fails() -> None:
    watch = SpeculationSwitch()
    waits = []
    for _ in range(8):
        run_rounds(watch, WINDOW_ROUNDS, 1)
        wait = 0
        while not watch.enabled:
            watch.record_plain(4, 1.0)
            wait += 4
        waits.append(wait)
    assert waits[:3] == [RETRY_ROUNDS, 2 * RETRY_ROUNDS, 4 * RETRY_ROUNDS] and waits[-1] == MAX_RETRY_ROUNDS
    assert watch.switched_off == 8 and watch.reason == ""
    run_rounds(watch, WINDOW_ROUNDS, 2)
    run_rounds(watch, WINDOW_ROUNDS, 1)
    watch.record_plain(RETRY_ROUNDS, 1.0)
    assert watch.enabled, "a window that paid resets the wait"

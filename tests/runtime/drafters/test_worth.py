"""A step of an SSM runs where what it has brought lately is worth its time, and is tried again now and then."""

from __future__ import annotations

import pytest

from flexspec.runtime.drafters.worth import PROBE_EVERY, StepWorth
from flexspec.tree import TokenTree

PATH = TokenTree((1, 2, 3, 4), (-1, 0, 1, 2), ("root", "ngram+ssm", "ssm", "ssm"), (1.0, 0.5, 0.5, 0.5))


def rounds(worth: StepWorth, count: int, chance: float, accepted: list[int], step_s: float = 0.1) -> int:
    """``count`` rounds of one second and two tokens each; returns in how many of them level 1 ran."""
    ran = 0
    for _ in range(count):
        worth.begin_round(2, 1.0)
        if worth.ask(1, chance):
            ran += 1
            worth.ran(1, step_s)
            worth.accepted(PATH, accepted)
    return ran


def test_unknown_times_are_found_out() -> None:
    assert StepWorth("ssm").ask(0, 0.01)


def test_a_step_that_brings_tokens_runs_always() -> None:
    assert rounds(StepWorth("ssm"), 200, 0.5, [0, 1, 2]) == 200


def test_a_step_that_brings_nothing_is_left_out_but_for_the_probes() -> None:
    worth = StepWorth("ssm")
    rounds(worth, 300, 0.5, [0])
    assert rounds(worth, 10 * PROBE_EVERY, 0.5, [0]) == 10


def test_a_small_chance_is_not_worth_a_dear_step() -> None:
    worth = StepWorth("ssm")
    rounds(worth, 200, 1.0, [0, 1, 2])  # one token a round for a chance of 1
    assert worth.gain(1, 1.0) == pytest.approx(1.0, rel=0.05)
    assert worth.ask(1, 0.3) and not worth.ask(1, 0.1)  # a token takes half a second, the step a tenth


def test_only_nodes_of_its_own_are_credited_and_to_their_level() -> None:
    worth = StepWorth("ssm")
    worth.begin_round(2, None)
    for level in (0, 1, 2):
        assert worth.ask(level, 10.0)
    worth.accepted(PATH, [0, 1, 2])
    before = [worth.gain(level, 1.0) for level in (0, 1, 2)]
    worth.begin_round(3, 1.0)
    after = [worth.gain(level, 1.0) for level in (0, 1, 2)]
    assert after[0] == after[2] < after[1] < before[1]


def test_a_better_text_is_noticed_by_a_probe() -> None:
    worth = StepWorth("ssm")
    rounds(worth, 300, 0.5, [0])
    assert rounds(worth, 40 * PROBE_EVERY, 0.5, [0, 1, 2]) > 20 * PROBE_EVERY

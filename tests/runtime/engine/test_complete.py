"""Requests run in the calling thread: many at once, streamed, cut short, failing; the engine is clean behind them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from itertools import islice
from typing import NoReturn

import pytest
from engine_models import SAMPLED, Models, alone, prompts
from engine_runs import Failing, Made, make_engine

from flexspec.errors import CapacityError, EngineError, RequestError
from flexspec.runtime.engine.complete import complete, stream
from flexspec.runtime.executors.step import Executor
from flexspec.sampling import SamplingParams

PLAN = "budget:24/sources=suffix+ngram+ssm"
LONG = SamplingParams(max_tokens=60)


@pytest.fixture
def made(models: Models) -> Made:
    return make_engine(models.llm, PLAN, {"ssm": models.ssm})


def finish_cancelled(made: Made) -> None:
    """One step, in which cancelled requests leave."""
    assert made.engine.step()
    assert not made.engine.step()
    made.check_empty()


def test_completions_are_what_plain_decoding_makes(models: Models, made: Made) -> None:
    asked = prompts(len(SAMPLED))
    expected = alone(models.llm, asked, SAMPLED)
    done = complete(made.engine, asked, SAMPLED)
    assert [list(one.token_ids) for one in done] == [one.tokens for one in expected]
    assert [one.text for one in done] == [one.text for one in expected]
    assert [one.finish_reason for one in done] == [one.last.finish_reason for one in expected]
    assert [list(one.prompt_ids) for one in done] == asked
    assert [one.stats.completion_tokens for one in done] == [len(one.token_ids) for one in done]
    made.check_empty()


def test_more_prompts_than_the_queue_holds_are_fed_in_turn(llm: Executor) -> None:
    made = make_engine(llm)
    done = complete(made.engine, [[i % 50] for i in range(300)], [SamplingParams(max_tokens=2)] * 300)
    assert len(done) == 300 and {one.finish_reason for one in done} == {"length"}


def test_no_prompts_are_no_completions(llm: Executor) -> None:
    assert complete(make_engine(llm).engine, [], []) == []


@pytest.mark.parametrize(("bad", "error"), [([-1], RequestError), ([], RequestError), ([1] * 500, CapacityError)])
def test_a_prompt_that_can_never_run_is_refused_before_any_runs(llm: Executor, bad: list[int], error: type) -> None:
    made = make_engine(llm)
    with pytest.raises(error):
        complete(made.engine, [[1], bad], [LONG] * 2)
    with pytest.raises(error):
        stream(made.engine, bad, LONG)  # at once, not when it is read
    assert not made.engine.step(), "nothing was submitted"


def test_a_stream_has_the_same_tokens_and_ends_with_the_stats(models: Models, made: Made) -> None:
    asked = prompts(1)
    (whole,) = complete(made.engine, asked, [LONG])
    deltas = list(stream(made.engine, asked[0], LONG))
    assert [token for delta in deltas for token in delta.token_ids] == list(whole.token_ids)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert deltas[-1].stats.completion_tokens == 60 and len(deltas) > 1
    made.check_empty()


def test_two_streams_take_turns_over_one_engine(made: Made) -> None:
    first, second = prompts(2)
    expected = complete(made.engine, [first, second], [LONG] * 2)
    together = zip(stream(made.engine, first, LONG), stream(made.engine, second, LONG), strict=False)
    one, two = next(together)
    assert one.token_ids[0] == expected[0].token_ids[0] and two.token_ids[0] == expected[1].token_ids[0]
    assert made.engine.load().running == 2
    del together
    finish_cancelled(made)


def test_a_consumer_that_leaves_cancels_its_request(made: Made) -> None:
    def read() -> None:
        for _ in stream(made.engine, [1, 2, 3], LONG):
            raise KeyError("the consumer's own")

    with pytest.raises(KeyError):
        read()
    assert list(islice(stream(made.engine, [1, 2, 3], LONG), 2))  # left by running out of interest
    finish_cancelled(made)
    assert len(complete(made.engine, [[1, 2, 3]], [LONG])[0].token_ids) == 60, "and it goes on"


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python's own handler, whatever the test run has set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("how", ["complete", "stream"])
def test_ctrl_c_waits_for_the_end_of_the_step_and_cancels(llm: Executor, how: str, interrupts: None) -> None:
    """In the middle of a step, where an exception would leave a round that nobody ends."""
    steps: list[int] = []

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        steps.append(1)  # Python would have raised before this line

    made = make_engine(Failing(llm, 3, interrupt), "budget:8/sources=suffix")
    with pytest.raises(KeyboardInterrupt):
        if how == "complete":
            complete(made.engine, [[1, 2], [3]], [LONG] * 2)
        else:
            list(stream(made.engine, [1, 2], LONG))
    assert steps and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finish_cancelled(made)
    assert len(complete(made.engine, [[1, 2]], [LONG])[0].token_ids) == 60


def test_a_failed_step_is_the_callers_error(llm: Executor) -> None:
    def fault() -> NoReturn:
        raise EngineError("a device that is gone", "a device", "restart")

    made = make_engine(Failing(llm, 2, fault))
    with pytest.raises(EngineError, match="a device that is gone"):
        complete(made.engine, [[1, 2], [3]], [LONG] * 2)
    with pytest.raises(EngineError, match="the engine has ended"):
        list(stream(made.engine, [1], LONG))


def test_a_bug_in_a_step_ends_every_callers_requests(llm: Executor) -> None:
    def fault() -> NoReturn:
        raise ZeroDivisionError("ours")

    made = make_engine(Failing(llm, 1, fault))
    _, other = made.submit([4, 5])
    with pytest.raises(ZeroDivisionError):
        complete(made.engine, [[1, 2]], [LONG])
    assert other.last.finish_reason == "error" and "ZeroDivisionError" in (other.last.error or "")


def test_threads_share_an_engine(models: Models, made: Made) -> None:
    asked = prompts(6)
    params = [SamplingParams(max_tokens=20)] * 6
    expected = [tuple(one.tokens) for one in alone(models.llm, asked, params)]
    done: dict[int, tuple[int, ...]] = {}

    def call(i: int) -> None:
        done[i] = complete(made.engine, [asked[i]], [params[i]])[0].token_ids

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [done[i] for i in range(6)] == expected
    made.check_empty()

"""Requests that are cancelled, refused or failed by their engine, and the thread that runs one."""

from __future__ import annotations

import threading
from typing import NoReturn

import numpy as np
import pytest
from engine_models import CONFIG, Models, alone, prompts, same
from engine_runs import Answer, Failing, make_engine
from step_models import on_cpu, tiny_llm

from flexspec.errors import CapacityError, EngineError, QueueFullError, RequestError
from flexspec.runtime.engine.thread import EngineThread
from flexspec.runtime.executors.step import Executor
from flexspec.sampling import SamplingParams


class TestCancel:
    @pytest.mark.parametrize("moment", range(9))
    def test_a_cancelled_request_gives_everything_back(self, models: Models, moment: int) -> None:
        made = make_engine(models.llm, "budget:24/sources=suffix+ngram+ssm", {"ssm": models.ssm}, max_running=2)
        asked = [list(range(170)), [1, 2, 3], [4, 5, 6]]  # three steps of prompt, decoding, queued
        expected = alone(models.llm, asked, [SamplingParams(max_tokens=12)] * 3)
        for victim in range(3):
            requests = [made.submit(prompt, SamplingParams(max_tokens=12)) for prompt in asked]
            for _ in range(moment):
                made.engine.step()
            made.engine.cancel(requests[victim][0])
            made.finish()
            reasons = [answer.last.finish_reason for _, answer in requests]
            assert reasons[victim] in ("cancelled", "length")
            others = [i for i in range(3) if i != victim]
            same([requests[i][1] for i in others], [expected[i] for i in others])
            cut = requests[victim][1].tokens
            assert cut == expected[victim].tokens[: len(cut)]

    def test_unknown_and_finished_ids_are_fine(self, llm: Executor) -> None:
        made = make_engine(llm)
        request, answer = made.submit([1], SamplingParams(max_tokens=2))
        made.finish()
        made.engine.cancel(request)
        made.engine.cancel(12345)
        made.finish()
        assert answer.last.finish_reason == "length"


class TestDoor:
    def test_what_can_never_run_is_refused_at_once(self, llm: Executor) -> None:
        made = make_engine(llm, context_tokens=100)
        for prompt, error in (([], RequestError), ([CONFIG.vocab_size], RequestError), ([-1], RequestError)):
            with pytest.raises(error):
                made.submit(prompt)
        with pytest.raises(CapacityError, match="100"):
            made.submit([1] * 100)
        small = make_engine(on_small_pool := Failing(llm, -1, lambda: None))
        on_small_pool.pages = 3
        small.engine._scheduler._pages = 3
        with pytest.raises(CapacityError, match="kv-tokens"):
            small.submit([1], SamplingParams(max_tokens=150))

    def test_the_queue_has_an_end(self, llm: Executor) -> None:
        made = make_engine(llm)
        for _ in range(256):
            made.submit([1], SamplingParams(max_tokens=1))
        with pytest.raises(QueueFullError):
            made.submit([1])
        made.finish()

    def test_requests_wait_in_line_for_pages(self, llm: Executor) -> None:
        made = make_engine(llm, context_tokens=200)
        params = [SamplingParams(max_tokens=190)] * 20  # 7 pages each of 96: 13 fit at a time
        told = [made.submit([i, i + 1], one)[1] for i, one in enumerate(params)]
        made.engine.step()
        assert made.engine.load().running == 13 and made.engine.load().queued == 7
        made.finish()
        assert all(len(answer.tokens) == 190 for answer in told)

    def test_age_of_the_last_step_starts_with_the_work(self, llm: Executor) -> None:
        made = make_engine(llm)
        made.engine._last_step -= 1000.0  # idle for long
        assert made.engine.last_step_age_s() == 0.0
        made.submit([1], SamplingParams(max_tokens=1))
        assert made.engine.last_step_age_s() < 100.0
        made.finish()


def fault() -> NoReturn:
    raise EngineError("a device that is gone", "a device", "restart")


class TestFailure:
    @pytest.mark.parametrize("at", [0, 1, 3])
    def test_a_failed_step_ends_every_request_with_an_error(self, llm: Executor, at: int) -> None:
        made = make_engine(Failing(llm, at, fault), "budget:8/sources=suffix", max_running=2)
        told = [made.submit([1, 2, 3])[1] for _ in range(4)]
        made.finish()
        for answer in told:
            assert answer.last.finish_reason == "error" and "a device that is gone" in (answer.last.error or "")
        assert "a device that is gone" in (made.engine.load().failure or "")
        with pytest.raises(EngineError, match="a device that is gone"):
            made.submit([1])

    def test_a_failing_ssm_is_a_failure_too(self, models: Models) -> None:
        made = make_engine(models.llm, "chain:3/sources=ssm", {"ssm": Failing(models.ssm, 2, fault)})
        _, answer = made.submit([1, 2, 3])
        made.finish()
        assert answer.last.finish_reason == "error"

    def test_logits_without_numbers_are_an_error(self) -> None:
        graph, weights = tiny_llm(CONFIG)
        broken = {name: array * np.float32(np.nan if name == "norm.weight" else 1) for name, array in weights.items()}
        made = make_engine(on_cpu(graph, broken, pages=8))
        _, answer = made.submit([1, 2, 3], SamplingParams(max_tokens=8))
        made.finish()
        assert answer.last.finish_reason == "error" and "finite" in (answer.last.error or "")


class TestThread:
    def test_requests_from_many_threads(self, llm: Executor) -> None:
        asked, params = prompts(12), [SamplingParams(max_tokens=15)] * 12
        expected = alone(llm, asked, params)
        made = make_engine(llm, "budget:24/sources=suffix+ngram")
        thread = EngineThread(made.engine)
        told = [Answer() for _ in asked]
        ends = [threading.Event() for _ in asked]

        def ask(i: int) -> None:
            def take(delta: object) -> None:
                told[i].deltas.append(delta)  # type: ignore[arg-type]
                if delta.finish_reason is not None:  # type: ignore[attr-defined]
                    ends[i].set()

            made.engine.submit(asked[i], params[i], take)

        askers = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for asker in askers:
            asker.start()
        assert all(end.wait(30) for end in ends)
        for asker in askers:
            asker.join()
        same(told, expected)
        thread.close()
        made.check_empty()

    def test_closing_ends_what_is_running_and_refuses_what_comes(self, llm: Executor) -> None:
        made = make_engine(llm)
        thread = EngineThread(made.engine)
        answer, started = Answer(), threading.Event()

        def take(delta: object) -> None:
            answer.deltas.append(delta)  # type: ignore[arg-type]
            started.set()

        made.engine.submit([1, 2], SamplingParams(max_tokens=180), take)
        assert started.wait(30)
        thread.close()
        thread.close()
        assert answer.last.finish_reason in ("cancelled", "length")
        with pytest.raises(EngineError, match="stopped"):
            made.engine.submit([1], SamplingParams(), take)
        made.check_empty()

    def test_closing_between_the_loops_look_and_its_sleep_is_seen(self, llm: Executor) -> None:
        class Late(threading.Event):
            """Clears only after ``thread`` was told to stop, so that the clear wipes out what close has set."""

            thread: EngineThread | None = None

            def clear(self) -> None:
                if self.thread is not None:
                    self.thread._stopping = True
                super().clear()

        made = make_engine(llm)
        made.engine.wanted = event = Late()
        thread = event.thread = EngineThread(made.engine)
        event.set()
        thread._thread.join(30)
        assert not thread._thread.is_alive()
        thread.close()

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_bug_of_ours_is_told_and_turns_health_red(self, llm: Executor) -> None:
        def bug() -> NoReturn:
            raise ZeroDivisionError("ours")

        made = make_engine(Failing(llm, 2, bug))
        thread = EngineThread(made.engine)
        ended = threading.Event()
        reasons: list[str | None] = []

        def take(delta: object) -> None:
            reasons.append(delta.finish_reason)  # type: ignore[attr-defined]
            if reasons[-1] is not None:
                ended.set()

        made.engine.submit([1, 2], SamplingParams(), take)
        assert ended.wait(30)
        assert reasons[-1] == "error" and "ZeroDivisionError: ours" in (made.engine.load().failure or "")
        thread.close()

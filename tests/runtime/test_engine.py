"""The round over generated CPU programs: speculation never changes a text, and every end gives everything back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import pytest
from engine_runs import Answer, Failing, Made, make_engine
from step_models import on_cpu, random_weights, tiny_config, tiny_llm

from flexspec.errors import CapacityError, EngineError, QueueFullError, RequestError
from flexspec.models.fused_state import graft_fuse_head
from flexspec.models.registry import build_model
from flexspec.runtime.api import RequestStats
from flexspec.runtime.drafters import budget
from flexspec.runtime.engine_thread import EngineThread
from flexspec.runtime.open_engine import measure_steps
from flexspec.runtime.step import Executor
from flexspec.sampling import SamplingParams
from flexspec.types import DType

CONFIG = tiny_config()
SSM_CONFIG = tiny_config(layers=1, heads=2, kv_heads=1, head_dim=32)
PLANS = [
    "chain:4/sources=suffix+ngram",
    "chain:3/sources=ssm",
    "tree:2,2,1",
    "tree:1,1,3,1/sources=ssm+suffix/nodes=20",
    "budget:24/depth=8/sources=suffix+ngram+ssm",
    "budget:200/depth=30/ssm_depth=3/beam=20/sources=suffix+ngram+ssm",
    "budget:5/depth=2/sources=ngram",
]
MIXED = "tree:2,2,1/sampled=mixed"


@dataclass
class Models:
    dtype: DType
    llm: Executor
    ssm: Executor


@pytest.fixture(scope="module", params=["bf16", "f32"])
def models(request: pytest.FixtureRequest) -> Iterator[Models]:
    dtype = DType(request.param)
    pair = Models(
        dtype,
        on_cpu(*tiny_llm(CONFIG, dtype), pages=96),
        on_cpu(*tiny_llm(SSM_CONFIG, dtype, seed=1), pages=96),
    )
    yield pair
    pair.llm.close()
    pair.ssm.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[Executor]:
    executor = on_cpu(*tiny_llm(CONFIG), pages=96)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def fused() -> Iterator[tuple[Executor, Executor]]:
    graph = graft_fuse_head(build_model(CONFIG, DType.F32, taps=(0, 1)))
    llm = on_cpu(graph, random_weights(graph), pages=96)
    graph = build_model(tiny_config(family="fused_state", layers=1), DType.F32, reduced_vocab_size=77)
    ssm = on_cpu(graph, random_weights(graph, seed=3), pages=96)
    yield llm, ssm
    llm.close()
    ssm.close()


def prompts(count: int) -> list[list[int]]:
    """Of many lengths; some repeat themselves, so that look-up drafts hit."""
    rng = np.random.default_rng(count)
    made = [rng.integers(0, CONFIG.vocab_size, int(size)).tolist() for size in rng.integers(1, 50, count)]
    return [prompt * 2 if i % 3 == 0 else prompt for i, prompt in enumerate(made)]


def alone(
    llm: Executor, asked: Sequence[list[int]], params: Sequence[SamplingParams], **options: object
) -> list[Answer]:
    """Plain decoding, one request after the other: what every other way must repeat."""
    made = make_engine(llm, "off", **options)  # type: ignore[arg-type]
    return [made.answers([prompt], [one])[0] for prompt, one in zip(asked, params, strict=True)]


def same(got: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one.tokens, one.text) == (other.tokens, other.text)
        assert one.last.finish_reason == other.last.finish_reason


SAMPLED = [
    SamplingParams(max_tokens=24, temperature=0.9, seed=5),
    SamplingParams(max_tokens=24, temperature=1.3, top_p=0.8, seed=6),
    SamplingParams(max_tokens=24, temperature=0.7, top_k=9, seed=7),
    SamplingParams(max_tokens=24, temperature=1.0, min_p=0.05, seed=-8),
    SamplingParams(max_tokens=24),
]


class TestLossless:
    def test_greedy_text_is_that_of_plain_decoding(self, models: Models) -> None:
        asked = prompts(12)
        params = [SamplingParams(max_tokens=10 + 3 * i) for i in range(12)]
        expected = alone(models.llm, asked, params)
        for plan in ["off", *PLANS, MIXED]:
            made = make_engine(models.llm, plan, {"ssm": models.ssm})
            same(made.answers(asked, params), expected)
            same([made.answers([p], [one])[0] for p, one in zip(asked[:3], params, strict=False)], expected[:3])

    def test_sampled_text_is_that_of_plain_decoding_with_the_same_seed(self, models: Models) -> None:
        asked = prompts(len(SAMPLED))
        expected = alone(models.llm, asked, SAMPLED)
        assert len({tuple(answer.tokens) for answer in expected}) == len(expected)
        for plan in PLANS:
            same(make_engine(models.llm, plan, {"ssm": models.ssm}).answers(asked, SAMPLED), expected)

    def test_prompts_enter_beside_decoding_requests(self, models: Models) -> None:
        asked = [*prompts(6), list(range(170))]  # the last takes several steps
        params = [SamplingParams(max_tokens=20)] * len(asked)
        expected = alone(models.llm, asked, params)
        for plan in PLANS:
            made = make_engine(models.llm, plan, {"ssm": models.ssm}, max_running=4)
            told = []
            for prompt, one in zip(asked, params, strict=True):
                told.append(made.submit(prompt, one)[1])
                made.engine.step()
                made.engine.step()
            made.finish()
            same(told, expected)

    def test_an_llm_that_drafts_for_itself_is_always_accepted(self, models: Models) -> None:
        twin = on_cpu(*tiny_llm(CONFIG, models.dtype), pages=96)
        made = make_engine(models.llm, "chain:4/sources=ssm", {"ssm": twin})
        for answer in made.answers(prompts(5), [SamplingParams(max_tokens=33)] * 5):
            stats = answer.last.stats
            assert stats.drafted == stats.accepted > 0
            assert stats.completion_tokens == 33 and stats.rounds == 7  # 1 + 6 * 5, and 2 that were left
        twin.close()

    def test_sampled_drafts_repeat_with_their_seed(self, models: Models) -> None:
        runs = [make_engine(models.llm, MIXED, {"ssm": models.ssm}).answers([[1, 2]], SAMPLED[:1]) for _ in range(2)]
        same(*runs)
        assert len(runs[0][0].tokens) == 24


class TestFusedState:
    @pytest.mark.parametrize("plan", ["chain:3/sources=ssm", "tree:2,2,1", "budget:16/sources=suffix+ngram+ssm"])
    def test_hidden_state_ssm_never_changes_the_text(self, fused: tuple[Executor, Executor], plan: str) -> None:
        llm, ssm = fused
        asked, params = prompts(6), [SamplingParams(max_tokens=25)] * 5 + [SAMPLED[0]]
        keep_ids = np.arange(0, 2 * ssm.vocab_size, 2)
        expected = alone(llm, asked, params)
        made = make_engine(llm, plan, {"ssm": ssm}, fused=True, keep_ids=keep_ids)
        same(made.answers(asked, params), expected)
        assert made.ssms[0].counts["rows"] > 0


class TestEnds:
    @pytest.mark.parametrize("plan", ["off", "chain:4/sources=suffix", "budget:24/sources=suffix+ngram"])
    def test_max_tokens_and_the_context_are_kept_to_the_token(self, llm: Executor, plan: str) -> None:
        prompt = [3, 4, 5] * 5
        whole = alone(llm, [prompt], [SamplingParams(max_tokens=60)])[0].tokens
        made = make_engine(llm, plan)
        for most in range(1, 11):
            answer = made.answers([prompt], [SamplingParams(max_tokens=most)])[0]
            assert answer.tokens == whole[:most]
            assert (answer.last.finish_reason, answer.last.stats.completion_tokens) == ("length", most)
        for context in (len(prompt) + 1, len(prompt) + 7):
            answer = make_engine(llm, plan, context_tokens=context).answers([prompt], [SamplingParams()])[0]
            assert answer.tokens == whole[: context - len(prompt)] and answer.last.finish_reason == "length"

    def test_an_end_token_ends_the_request_wherever_it_stands_in_a_block(self, models: Models) -> None:
        asked, params = prompts(6), [SamplingParams(max_tokens=30)] * 6
        plain = alone(models.llm, asked, params)
        for at in (0, 5):
            eos = [plain[i].tokens[at + i] for i in range(3)]
            expected = alone(models.llm, asked, params, eos_ids=eos)
            assert any(answer.last.finish_reason == "stop" for answer in expected)
            for plan in PLANS[1:5]:
                same(make_engine(models.llm, plan, {"ssm": models.ssm}, eos_ids=eos).answers(asked, params), expected)

    def test_a_stop_string_ends_the_text_before_itself(self, models: Models) -> None:
        asked = prompts(3)
        plain = alone(models.llm, asked, [SamplingParams(max_tokens=40)] * 3)
        params = [SamplingParams(max_tokens=40, stop=(answer.text[9:12],)) for answer in plain]
        expected = alone(models.llm, asked, params)
        for answer, one, before in zip(expected, params, plain, strict=True):
            assert answer.text == before.text[: before.text.index(one.stop[0])]
        for plan in PLANS[:5]:
            same(make_engine(models.llm, plan, {"ssm": models.ssm}).answers(asked, params), expected)

    def test_accepted_counts_only_what_was_committed(self, models: Models) -> None:
        twin = on_cpu(*tiny_llm(CONFIG, models.dtype), pages=96)
        tokens = alone(models.llm, [[1, 2, 3]], [SamplingParams(max_tokens=20)])[0].tokens
        end = next(i for i in range(2, 20) if tokens[i] not in tokens[:i])
        made = make_engine(models.llm, "chain:8/sources=ssm", {"ssm": twin}, eos_ids=[tokens[end]])
        stats = made.answers([[1, 2, 3]], [SamplingParams(max_tokens=20)])[0].last.stats
        assert stats.completion_tokens == end + 1
        assert stats.accepted == stats.completion_tokens - 1 - (stats.rounds - 1)  # each full round gives one more
        twin.close()


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


@dataclass
class Counts:
    """An observer that adds up."""

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    committed: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    finished: list[tuple[str, RequestStats, float | None]] = field(default_factory=list)
    pages: tuple[int, int] = (0, 0)
    load: tuple[int, int] = (-1, -1)

    def record_round(self, source: str, drafted: Sequence[int], accepted: Sequence[int], committed: int) -> None:
        assert len(drafted) == len(accepted) and all(a <= d for a, d in zip(accepted, drafted, strict=True))
        assert bool(drafted) == (source != "off")
        self.drafted, self.accepted = self.drafted + sum(drafted), self.accepted + sum(accepted)
        self.rounds, self.committed = self.rounds + bool(committed), self.committed + committed

    def record_step(self, seconds: float, kind: str) -> None:
        assert seconds >= 0.0
        self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def record_finished(self, reason: str, stats: RequestStats, first_token_s: float | None) -> None:
        self.finished.append((reason, stats, first_token_s))

    def set_pages(self, free: int, total: int) -> None:
        self.pages = (free, total)

    def set_load(self, running: int, queued: int) -> None:
        self.load = (running, queued)


class TestCounters:
    def test_observer_stats_and_clock_agree(self, models: Models) -> None:
        seen = Counts()
        made = make_engine(models.llm, PLANS[4], {"ssm": models.ssm}, observer=seen)
        assert seen.pages == (96, 96) and seen.load == (0, 0)
        answers = made.answers(prompts(6), [SamplingParams(max_tokens=20)] * 6)
        stats = [answer.last.stats for answer in answers]
        assert [reason for reason, _, _ in seen.finished] == ["length"] * 6
        assert all(first is not None and first > 0.0 for _, _, first in seen.finished)
        assert (seen.drafted, seen.accepted) == (sum(s.drafted for s in stats), sum(s.accepted for s in stats))
        assert seen.rounds == sum(s.rounds for s in stats)
        assert seen.committed == sum(s.completion_tokens - 1 for s in stats)  # prefill gives each its first
        assert all(s.prefill_s > 0.0 and s.decode_s > 0.0 and s.prompt_tokens > 0 for s in stats)
        assert seen.kinds["draft"] > 0 and seen.kinds["verify"] > 0 and seen.kinds["prefill"] == 1
        clock = made.engine.clock
        assert 0.0 < clock.step_s < clock.total_s and clock.draft_s > 0.0 and clock.overhead_s > 0.0
        assert seen.pages == (96, 96) and seen.load == (0, 0)

    def test_measured_step_costs_rise(self, llm: Executor) -> None:
        cost, seconds = measure_steps(llm, 24)
        assert cost.rows == (1, 4, 8, 12, 16, 24, 25)
        assert cost.costs[0] == 1.0 and list(cost.costs) == sorted(cost.costs) and 0.0 < seconds < 1.0


def step_until(made: Made, *, enabled: bool) -> None:
    while made.engine.watch.enabled is not enabled:
        assert made.engine.step()


class TestScheduling:
    def test_big_trees_leave_room_for_prompts(self, models: Models) -> None:
        made = make_engine(models.llm, "tree:4,4,2", {"ssm": models.ssm})
        for i in range(8):
            made.submit([i, 1], SamplingParams(max_tokens=100))
        for _ in range(3):
            made.engine.step()
        made.submit(list(range(150)), SamplingParams(max_tokens=4))
        for _ in range(7):  # 150 tokens by a quarter of 96 rows
            made.engine.step()
        assert all(running.prefilled for running in made.engine._scheduler.running)
        made.engine.stop()
        made.check_empty()

    def test_speculation_that_never_pays_is_switched_off_and_tried_again(
        self, models: Models, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(budget, "WINDOW_ROUNDS", 100)
        made = make_engine(models.llm, "chain:2/sources=ssm", {"ssm": models.ssm})
        made.engine.watch._retry_rounds = 60
        told = [made.submit([i, 7], SamplingParams(max_tokens=60))[1] for i in range(10)]
        step_until(made, enabled=False)
        steps = made.ssms[0].counts["steps"]
        made.engine.step()
        assert made.ssms[0].counts["steps"] == steps and "tokens a round" in made.engine.watch.reason
        step_until(made, enabled=True)
        made.engine.step()
        assert made.ssms[0].counts["steps"] > steps
        made.finish()
        asked = [[i, 7] for i in range(10)]
        same(told, alone(models.llm, asked, [SamplingParams(max_tokens=60)] * 10))

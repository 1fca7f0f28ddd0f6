"""The round over generated CPU programs: speculation never changes a text, and every end gives everything back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from engine_models import CONFIG, MIXED, PLANS, SAMPLED, Models, alone, prompts, same
from engine_runs import Answer, Made, Wrapped, make_engine
from step_models import on_cpu, tiny_llm

from flexspec.runtime.drafters import budget
from flexspec.runtime.engine.api import RequestStats
from flexspec.runtime.executors.step import Executor, StepBatch, StepResult
from flexspec.runtime.open import step_costs
from flexspec.sampling import SamplingParams

QUICK = ("off", PLANS[0], PLANS[1], PLANS[2])
SLOW = pytest.mark.slow(reason="wide or deep trees over an LLM of two layers, in two dtypes: 35 s together")


def cases(*plans: str) -> list[object]:
    return [plan if plan in QUICK else pytest.param(plan, marks=SLOW) for plan in plans]


@dataclass
class Plain:
    """Prompts, and what plain decoding answers: computed once for all draft plans."""

    asked: list[list[int]]
    params: Sequence[SamplingParams]
    answers: list[Answer]


def decoded(models: Models, asked: list[list[int]], params: Sequence[SamplingParams], **options: object) -> Plain:
    return Plain(asked, params, alone(models.llm, asked, params, **options))


@pytest.fixture(scope="module")
def greedy(models: Models) -> Plain:
    return decoded(models, prompts(12), [SamplingParams(max_tokens=10 + 3 * i) for i in range(12)])


@pytest.fixture(scope="module")
def sampled(models: Models) -> Plain:
    return decoded(models, prompts(len(SAMPLED)), SAMPLED)


@pytest.fixture(scope="module")
def long_last(models: Models) -> Plain:
    """The last prompt takes several steps."""
    return decoded(models, [*prompts(6), list(range(170))], [SamplingParams(max_tokens=20)] * 7)


class TestLossless:
    @pytest.mark.parametrize("plan", cases("off", *PLANS, MIXED))
    def test_greedy_text_is_that_of_plain_decoding(self, models: Models, greedy: Plain, plan: str) -> None:
        made = make_engine(models.llm, plan, {"ssm": models.ssm})
        same(made.answers(greedy.asked, greedy.params), greedy.answers)
        alone_again = [made.answers([greedy.asked[i]], [greedy.params[i]])[0] for i in range(3)]
        same(alone_again, greedy.answers[:3])

    @pytest.mark.parametrize("plan", cases(*PLANS))
    def test_sampled_text_is_that_of_plain_decoding_with_the_same_seed(
        self, models: Models, sampled: Plain, plan: str
    ) -> None:
        assert len({tuple(answer.tokens) for answer in sampled.answers}) == len(sampled.answers)
        same(make_engine(models.llm, plan, {"ssm": models.ssm}).answers(sampled.asked, SAMPLED), sampled.answers)

    @pytest.mark.parametrize("plan", cases(*PLANS))
    def test_prompts_enter_beside_decoding_requests(self, models: Models, long_last: Plain, plan: str) -> None:
        made = make_engine(models.llm, plan, {"ssm": models.ssm}, max_running=4)
        told = []
        for prompt, one in zip(long_last.asked, long_last.params, strict=True):
            told.append(made.submit(prompt, one)[1])
            made.engine.step()
            made.engine.step()
        made.finish()
        same(told, long_last.answers)

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

    @pytest.mark.parametrize("plan", PLANS[1:5])
    @pytest.mark.parametrize("at", [0, 5])
    def test_an_end_token_ends_the_request_wherever_it_stands_in_a_block(
        self, models: Models, at: int, plan: str
    ) -> None:
        asked, params = prompts(6), [SamplingParams(max_tokens=30)] * 6
        plain = alone(models.llm, asked[:3], params[:3])
        eos = [plain[i].tokens[at + i] for i in range(3)]
        expected = alone(models.llm, asked, params, eos_ids=eos)
        assert any(answer.last.finish_reason == "stop" for answer in expected)
        same(make_engine(models.llm, plan, {"ssm": models.ssm}, eos_ids=eos).answers(asked, params), expected)

    @pytest.mark.parametrize("plan", PLANS[:5])
    def test_a_stop_string_ends_the_text_before_itself(self, models: Models, plan: str) -> None:
        asked = prompts(3)
        plain = alone(models.llm, asked, [SamplingParams(max_tokens=40)] * 3)
        params = [SamplingParams(max_tokens=40, stop=(answer.text[9:12],)) for answer in plain]
        expected = alone(models.llm, asked, params)
        for answer, one, before in zip(expected, params, plain, strict=True):
            assert answer.text == before.text[: before.text.index(one.stop[0])]
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

    def test_measured_step_costs_are_the_clocks(self, llm: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a clock that only a step moves: 2 ms, and half a millisecond for each further row."""
        now_s = 0.0

        class Timed(Wrapped):
            def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
                nonlocal now_s
                now_s += 0.002 + 0.0005 * (len(batch.ids_T) - 1)
                return super().step(batch, want_logits=want_logits, want_features=want_features)

        monkeypatch.setattr(step_costs.time, "perf_counter", lambda: now_s)
        cost, seconds = step_costs.measure_steps(Timed(llm), 24)
        assert cost.rows == (1, 4, 8, 12, 16, 24, 25)
        assert seconds == pytest.approx(0.002)
        assert cost.costs == pytest.approx([1 + 0.25 * (rows - 1) for rows in cost.rows])


def step_until(made: Made, *, enabled: bool) -> None:
    while made.engine.speculation.enabled is not enabled:
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
        made.engine.speculation._retry_rounds = 60
        told = [made.submit([i, 7], SamplingParams(max_tokens=60))[1] for i in range(10)]
        step_until(made, enabled=False)
        steps = made.ssms[0].counts["steps"]
        made.engine.step()
        assert made.ssms[0].counts["steps"] == steps and "tokens a round" in made.engine.speculation.reason
        step_until(made, enabled=True)
        made.engine.step()
        assert made.ssms[0].counts["steps"] > steps
        made.finish()
        asked = [[i, 7] for i in range(10)]
        same(told, alone(models.llm, asked, [SamplingParams(max_tokens=60)] * 10))

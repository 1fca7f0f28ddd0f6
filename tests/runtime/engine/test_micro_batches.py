"""Several micro-batches in flight: the texts of one, whoever drafts and however late results come."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import pytest
from engine_models import MIXED, PLANS, SAMPLED, Models, alone, prompts, same
from engine_runs import Answer, Failing, Letters, Made
from overlapping import Courier, Held

from flexspec.draft_plan import DraftLadder, DraftPlan
from flexspec.errors import EngineError
from flexspec.runtime.distributed.drafts import DraftHost, RemoteDrafter
from flexspec.runtime.drafters.base import Drafter
from flexspec.runtime.drafters.planned import PlannedDrafter
from flexspec.runtime.drafters.ssm import SsmDrafter
from flexspec.runtime.drafters.suffix import SuffixDrafter
from flexspec.runtime.engine.engine import Engine
from flexspec.runtime.engine.micro_batches import MicroBatches
from flexspec.runtime.engine.round import Round
from flexspec.runtime.engine.scheduler import EngineLimits, Running
from flexspec.runtime.executors.step import Executor
from flexspec.sampling import SamplingParams

LADDER = DraftLadder(
    ((1, DraftPlan.parse("tree:1,1,3,1")), (2, DraftPlan.parse("chain:3/sources=ssm")), (4, DraftPlan("off")))
)


def make(
    llm: Executor, ladder: DraftLadder, ssm: Executor, count: Callable[[int], int], *, distant: bool = False
) -> Made:
    """An engine whose SSM drafts here, or through messages as on another rank."""
    local = SsmDrafter(ssm, next(p.expansion for p in ladder.plans if "ssm" in p.sources), llm.vocab_size)
    drafter: Drafter = local
    if distant:
        posts = [Courier(DraftHost([local]))]
        drafter = RemoteDrafter("ssm", posts, None, reads_features=False, clock=time.perf_counter)
    planned = PlannedDrafter(ladder, [SuffixDrafter(), drafter])
    engine = Engine(llm, planned, Letters, (), EngineLimits(200, 16), None, count)
    return Made(engine, [] if distant else [local])


ASKED, PARAMS = prompts(9), [SamplingParams(max_tokens=7 + 4 * i) for i in range(6)] + SAMPLED[:3]


@pytest.fixture(scope="module")
def plain(models: Models) -> list[Answer]:
    return alone(models.llm, ASKED, PARAMS)


@pytest.mark.slow(reason="72 cases: 25 s of processor time together")
@pytest.mark.parametrize("returns_early", [True, False])
@pytest.mark.parametrize("distant", [False, True])
@pytest.mark.parametrize("count", [2, 3, 16])
@pytest.mark.parametrize("text", [PLANS[1], PLANS[3], MIXED])
def test_texts_are_those_of_plain_decoding(
    models: Models, plain: list[Answer], text: str, count: int, distant: bool, returns_early: bool
) -> None:
    held = Held(models.llm, returns_early=returns_early)
    ladder = DraftLadder.of(DraftPlan.parse(text))
    made = make(held, ladder, models.ssm, lambda requests: count, distant=distant)
    found = made.answers(ASKED, PARAMS)
    exact = 6 if text == MIXED else 9  # drafts sampled at random change what is sampled, not its law
    same(found[:exact], plain[:exact])
    assert held.most == (min(count, 9) if returns_early else 1)


def test_every_batch_size_has_its_rung(models: Models) -> None:
    """Six requests of different lengths: all rungs are used as they end, and micro-batches grow fewer."""
    asked, params = prompts(6), [SamplingParams(max_tokens=5 + 9 * i) for i in range(6)]
    expected = alone(models.llm, asked, params)
    counts: list[int] = []

    def count(requests: int) -> int:
        counts.append(requests)
        return {1: 1, 2: 2, 3: 2}.get(requests, 3)

    made = make(Held(models.llm), LADDER, models.ssm, count)
    same(made.answers(asked, params), expected)
    assert set(counts) >= {1, 2, 3, 4, 5, 6}
    drafted = {answer.last.stats.drafted > 0 for answer in (made.answers(asked[:1], params[:1]))}
    assert drafted == {True} and made.ssms[0].counts["steps"] > 0


def test_requests_come_and_go_while_steps_are_in_flight(models: Models) -> None:
    asked, params = prompts(8), [SamplingParams(max_tokens=30)] * 8
    expected = alone(models.llm, asked, params)
    made = make(
        Held(models.llm), DraftLadder.of(DraftPlan.parse("chain:3/sources=ssm+suffix")), models.ssm, lambda n: 3
    )
    told = []
    for i, (prompt, one) in enumerate(zip(asked, params, strict=True)):
        told.append(made.submit(prompt, one))
        made.engine.step()
        if i % 3 == 2:
            made.engine.cancel(told[i - 1][0])
    made.finish()
    for i, (_, answer) in enumerate(told):
        if i % 3 == 1 and i < 7:
            assert answer.last.finish_reason == "cancelled"
            assert answer.tokens == expected[i].tokens[: len(answer.tokens)]
        else:
            assert answer.tokens == expected[i].tokens


def test_all_cancelled_while_drafts_and_steps_are_under_way(models: Models) -> None:
    plan = DraftLadder.of(DraftPlan.parse("chain:3/sources=ssm"))
    for returns_early in (True, False):
        made = make(Held(models.llm, returns_early=returns_early), plan, models.ssm, lambda n: 2, distant=True)
        told = [made.submit(prompt, SamplingParams(max_tokens=50)) for prompt in prompts(4)]
        for _ in range(5):
            made.engine.step()
        for ident, _ in told:
            made.engine.cancel(ident)
        made.finish()
        assert {answer.last.finish_reason for _, answer in told} == {"cancelled"}
        assert made.submit([1, 2], SamplingParams(max_tokens=3)) and made.finish() is None


def test_a_failing_step_ends_all_micro_batches(models: Models) -> None:
    def fault() -> None:
        raise EngineError("a rank is gone", "ranks that answer", "start again")

    held = Held(Failing(models.llm, 9, fault))
    made = make(held, DraftLadder.of(DraftPlan.parse("chain:3/sources=ssm")), models.ssm, lambda n: 3)
    told = [made.submit(prompt, SamplingParams(max_tokens=40))[1] for prompt in prompts(6)]
    made.finish()
    assert {answer.last.finish_reason for answer in told} == {"error"}
    assert made.engine.free_pages == models.llm.pages


class TestMembers:
    def requests(self, count: int) -> list[Running]:
        return [Running(None, lambda delta: None, 0.0, None, 0) for _ in range(count)]  # type: ignore[arg-type]

    def test_they_are_shared_out_evenly(self) -> None:
        batches = MicroBatches(lambda requests: 3)
        for running in self.requests(8):
            batches.add(running)
        assert sorted(len(each.members) for each in batches.idle()) == [2, 3, 3]

    def test_what_is_in_flight_keeps_its_members(self) -> None:
        table: Mapping[int, int] = {4: 2, 3: 1, 2: 1, 1: 1}
        batches = MicroBatches(lambda requests: table[requests])
        asked = self.requests(4)
        for running in asked:
            batches.add(running)
        first, second = batches.idle()
        second.round = Round([], [], None, 0.0)
        batches.remove(first.members[0])
        idle = batches.idle()  # one micro-batch is left for three, but the second one's are on their way
        assert idle == [first] and len(first.members) == 1 and len(second.members) == 2
        second.round = None
        assert [len(each.members) for each in batches.idle()] == [3]

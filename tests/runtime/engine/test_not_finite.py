"""A row that is not finite ends its own request; everyone else goes on, also in the pages it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from engine_models import SAMPLED, SSM_CONFIG
from engine_runs import Letters, Made, Wrapped, make_engine
from step_models import on_cpu, random_weights, tiny_config, tiny_llm

from flexspec.models.registry import build_model
from flexspec.runtime.executors.cpu import CpuExecutor
from flexspec.runtime.executors.step import Executor, StepBatch, StepResult
from flexspec.sampling import SamplingParams
from flexspec.types import DType

BROKEN = 100  # the token whose embedding is not a number
PARAMS = [SamplingParams(max_tokens=12), SAMPLED[0]]
GREEDY = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module", params=["bf16", "f32"])
def llm(request: pytest.FixtureRequest) -> Iterator[CpuExecutor]:
    graph = build_model(tiny_config(tied_embeddings=False), DType(request.param))
    weights = random_weights(graph)
    weights["embed_tokens.weight"][BROKEN] = np.nan
    weights["lm_head.weight"][BROKEN] = -weights["lm_head.weight"][:50].mean(0)
    executor = on_cpu(graph, weights, pages=12)
    yield executor
    executor.close()


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    made: list[list[int]] = [rng.integers(0, BROKEN, 20).tolist() for _ in range(3)]
    return made


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", ["off", "budget:24/depth=8/sources=suffix+ngram"])
@pytest.mark.parametrize("broken", [[50, BROKEN, 60], [BROKEN], [7] * 30 + [BROKEN]])
def test_the_neighbours_of_a_broken_prompt_go_on(
    llm: Executor, params: SamplingParams, draft: str, broken: Sequence[int]
) -> None:
    expected = [make_engine(llm).answers([prompt], [params])[0].tokens for prompt in prompts()]
    made = make_engine(llm, draft)
    answers = made.answers([broken, *prompts()], [params] * 4)
    assert answers[0].last.finish_reason == "error" and "not finite" in str(answers[0].last.error)
    assert [answer.tokens for answer in answers[1:]] == expected
    assert made.engine.load().failure is None
    assert made.answers([prompts()[0]], [params])[0].tokens == expected[0], "it takes new requests"


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_pages_of_a_broken_request_harm_nobody_after_it(llm: Executor, params: SamplingParams) -> None:
    """The next request's blocks of keys reach into what the broken one left in its pages."""
    expected = make_engine(llm).answers([prompts()[0]], [params])[0].tokens
    made = make_engine(llm)
    made.answers([[BROKEN] * 190, [BROKEN] * 150], [params] * 2)
    assert made.answers([prompts()[0]], [params])[0].tokens == expected


def test_a_drafted_token_that_breaks_its_row_harms_no_sibling(llm: Executor) -> None:
    """The prompt holds the broken token nowhere, the drafts always do: tokens are those without drafts."""
    expected = make_engine(llm).answers([prompts()[0]], [GREEDY])[0]
    graph, weights = tiny_llm(SSM_CONFIG)
    inner = on_cpu(graph, weights, pages=12)
    answer = make_engine(llm, "tree:3,3/sources=ssm", {"ssm": _Proposes(inner)}).answers([prompts()[0]], [GREEDY])[0]
    assert answer.tokens == expected.tokens and answer.last.finish_reason == "length"
    inner.close()


class _Proposes(Wrapped):
    """An SSM whose first choice is always the broken token."""

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        result = super().step(batch, want_logits=want_logits, want_features=want_features)
        assert result.logits_LV is not None
        result.logits_LV[:, BROKEN] = result.logits_LV.max() + 1.0
        return result


class _BreaksAt(Wrapped):
    """The row of the newest token of sequence position ``at`` is not finite, in logits and argmax."""

    def __init__(self, inner: Executor, at: int) -> None:
        super().__init__(inner)
        self.at = at

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        result = super().step(batch, want_logits=want_logits, want_features=want_features)
        broken = batch.positions_T[batch.logit_rows_L] == self.at
        result.argmax_L[broken] = -1
        if result.logits_LV is not None:
            result.logits_LV[broken] = np.nan
        return result


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", ["chain:4/sources=suffix+ngram", "budget:24/depth=8/sources=suffix+ngram"])
def test_what_was_committed_before_the_broken_row_is_kept(llm: Executor, params: SamplingParams, draft: str) -> None:
    """As without drafts, also when the row is in the middle of an accepted path."""
    prompt = [1, 2, 3, 4] * 4
    whole = make_engine(llm).answers([prompt], [params])[0].tokens
    for at in range(len(prompt) - 1, len(prompt) + 6):
        made: Made = make_engine(_BreaksAt(llm, at), draft)
        answer = made.answers([prompt], [params])[0]
        assert answer.last.finish_reason == "error"
        kept = whole[: at + 1 - len(prompt)]
        assert answer.tokens == kept and answer.text == Letters().push(kept)

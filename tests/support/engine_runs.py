"""Engines over small models, requests collected to their ends, and executors that fail on purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact.ngram_table import build_table
from flexspec.draft_plan import DraftLadder, DraftPlan
from flexspec.runtime.drafters.base import Drafter
from flexspec.runtime.drafters.ngram import NgramDrafter, NgramModel
from flexspec.runtime.drafters.planned import PlannedDrafter
from flexspec.runtime.drafters.ssm import SsmDrafter
from flexspec.runtime.drafters.suffix import SuffixDrafter
from flexspec.runtime.engine.api import Delta
from flexspec.runtime.engine.engine import Engine
from flexspec.runtime.engine.observer import Observer
from flexspec.runtime.engine.scheduler import EngineLimits
from flexspec.runtime.executors.step import Executor, StepBatch, StepResult
from flexspec.runtime.executors.top_successors import top_successors
from flexspec.sampling import SamplingParams


class Letters:
    """A detokenizer with one letter a token."""

    def push(self, tokens: list[int]) -> str:
        return "".join(chr(0x100 + token) for token in tokens)

    def hidden(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass
class Answer:
    """What one request was told."""

    deltas: list[Delta] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def last(self) -> Delta:
        assert [d.finish_reason for d in self.deltas[:-1]] == [None] * (len(self.deltas) - 1), "told after its end"
        return self.deltas[-1]


@dataclass
class Made:
    """An engine with its SSM drafters, for tests that look at their pools."""

    engine: Engine
    ssms: list[SsmDrafter]

    def submit(self, prompt: Sequence[int], params: SamplingParams | None = None) -> tuple[int, Answer]:
        answer = Answer()
        return self.engine.submit(list(prompt), params or SamplingParams(), answer.deltas.append), answer

    def finish(self) -> None:
        """Step until nothing is left, and look for leaks."""
        while self.engine.step():
            pass
        self.check_empty()

    def check_empty(self) -> None:
        assert self.engine.free_pages == self.engine.executor.pages
        for ssm in self.ssms:
            assert ssm.free_pages == ssm._executor.pages
        assert self.engine.load().running == self.engine.load().queued == 0

    def answers(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """All prompts at once."""
        told = [self.submit(prompt, one)[1] for prompt, one in zip(prompts, params, strict=True)]
        self.finish()
        return told


def make_engine(
    llm: Executor,
    draft: str = "off",
    ssms: Mapping[str, Executor] | None = None,
    *,
    eos_ids: Sequence[int] = (),
    context_tokens: int = 200,
    max_running: int = 16,
    observer: Observer | None = None,
    fused: bool = False,
    keep_ids: NDArray[np.integer] | None = None,
) -> Made:
    plan = DraftPlan.parse(draft)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, llm.vocab_size, 30).tolist() for _ in range(8)]
    drafters: list[Drafter] = [SuffixDrafter()]
    drafters.append(NgramDrafter(NgramModel(build_table([(text[:4], text[4:]) for text in texts]))))
    made = [
        SsmDrafter(
            executor, plan.expansion, llm.vocab_size, name=name, sampled=plan.sampled, reads_features=fused,
            keep_ids=keep_ids,
        )
        for name, executor in (ssms or {}).items()
    ]  # fmt: skip
    planned = PlannedDrafter(DraftLadder.of(plan), [*drafters, *made])
    limits = EngineLimits(context_tokens, max_running)
    return Made(Engine(llm, planned, Letters, eos_ids, limits, observer), made)


class Wrapped:
    """An executor that does what another does."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.vocab_size, self.max_rows, self.pages = inner.vocab_size, inner.max_rows, inner.pages
        self.max_positions = inner.max_positions

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        return self.inner.step(batch, want_logits=want_logits, want_features=want_features)

    def top_successors(self, logits_LV: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return top_successors(logits_LV, k)

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        self.inner.move_kv(src_slots, dst_slots)

    def close(self) -> None:
        self.inner.close()


class Failing(Wrapped):
    """An executor that calls ``fault`` before the step with number ``at`` (from 0)."""

    def __init__(self, inner: Executor, at: int, fault: Callable[[], None]) -> None:
        super().__init__(inner)
        self.at, self.fault, self.steps = at, fault, 0

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        if self.steps == self.at:
            self.fault()
        self.steps += 1
        return super().step(batch, want_logits=want_logits, want_features=want_features)

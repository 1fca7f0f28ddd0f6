"""Runs rounds of an artifact as serving would and notes what each took, for calibration and for measuring plans.

One process: rank 0 of a plan, or the only one. An engine for each draft plan, all over one LLM; requests have random
tokens, so that nothing is assumed about a text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from flexspec.compiler.artifact.model_record import LLM
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.draft_plan import SSMS, DraftLadder, DraftPlan, worst_case
from flexspec.errors import EngineError
from flexspec.runtime.drafters.budget import SpeculationWatch
from flexspec.runtime.engine.api import Delta, RequestStats
from flexspec.runtime.engine.engine import Engine
from flexspec.runtime.executors.cpu import CpuExecutor
from flexspec.runtime.executors.step import Executor
from flexspec.runtime.executors.step_times import StepTimes
from flexspec.runtime.open.engine import open_artifact_engine
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.runtime.open.served import Served
from flexspec.sampling import SamplingParams

_SEED = 7
_PROMPT_STEPS = 16  # rounds that a request may run while the prompts of others are read


@dataclass(frozen=True, slots=True)
class Ask:
    """Rounds to run: ``batch`` requests that have ``context`` tokens each, the first ``warm`` rounds being left out."""

    draft: str
    batch: int
    context: int
    rounds: int
    warm: int

    @property
    def most_tokens(self) -> int:
        """Tokens that a request may make until all rounds have run."""
        return (self.warm + self.rounds + _PROMPT_STEPS) * (worst_case(DraftPlan.parse(self.draft)).max_depth + 1)

    @property
    def kv_tokens(self) -> int:
        """Cache that the requests need together."""
        return self.batch * (self.context + self.most_tokens + worst_case(DraftPlan.parse(self.draft)).max_nodes + 64)


@dataclass(slots=True)
class Round:
    """One round as rank 0 saw it: microseconds, its step of the LLM, and the steps [from, to) of each SSM."""

    total_us: float
    draft_us: float
    verify_us: float
    step: int
    ssm_steps: list[tuple[int, int]]


@dataclass(slots=True)
class _Heard:
    """The engine's observer: the times of the step that runs."""

    seconds: dict[str, float] = field(default_factory=dict)

    def record_step(self, seconds: float, kind: str) -> None:
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def record_round(self, source: str, drafted: Sequence[int], accepted: Sequence[int], committed: int) -> None: ...

    def record_finished(self, reason: str, stats: RequestStats, first_token_s: float | None) -> None: ...

    def set_pages(self, free: int, total: int) -> None: ...

    def set_load(self, running: int, queued: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Opened:
    """The engine of a draft plan, and the times of its LLM's steps (of rank 0's shard) and of each SSM's."""

    served: Served
    heard: _Heard
    llm: StepTimes
    ssms: list[StepTimes]


class RoundRuns:
    """``several``: other ranks of the artifact's plan run too, and all draft plans share them."""

    def __init__(self, path: Path, options: ServeOptions, *, several: bool = False) -> None:
        self._options, self._several = options, several
        self._artifact = OpenedArtifact.at(path, check_digests=options.checks)
        self._ranks: tuple[Executor, StepTimes] | None = None
        self._engines: dict[str, Opened] = {}

    def open(self, draft: str) -> Opened:
        """The engine of a draft plan, made at first use. Raises what open_engine raises."""
        if draft not in self._engines:
            heard = _Heard()
            asked = replace(self._options, draft=draft)
            served = open_artifact_engine(self._artifact, asked, heard, self._open_llm if self._several else None)
            llm, *ssms = served.executors
            times = self._ranks[1] if self._ranks else self._keep_times(LLM, llm)
            names = [name for name in SSMS if name in served.draft.sources]  # in the order of executors
            kept = [self._keep_times(name, each) for name, each in zip(names, ssms, strict=True)]
            self._engines[draft] = Opened(served, heard, times, kept)
        return self._engines[draft]

    def _keep_times(self, part: str, executor: Executor) -> StepTimes:
        assert isinstance(executor, CpuExecutor)
        return executor.keep_times(len(self._artifact.graph(part).nodes))

    def _open_llm(self, artifact: OpenedArtifact, ladder: DraftLadder, options: ServeOptions) -> Executor:
        """The ranks' executor, once for all; with the options that the other ranks have."""
        if self._ranks is None:
            from flexspec.runtime.distributed.open import open_leader

            kept: list[StepTimes] = []
            executor = open_leader(artifact, ladder, self._options, lambda program: kept.append(program.keep_times()))
            self._ranks = executor, kept[0]
        return self._ranks[0]

    def run(self, ask: Ask) -> list[Round]:
        """Fill the contexts and run rounds: those behind the warm ones. Raises EngineError when a request ends."""
        opened = self.open(ask.draft)
        engine = opened.served.engine
        engine.watch = SpeculationWatch()  # what it learned of other rounds must not switch drafting off in these
        started: set[int] = set()
        ended: list[str] = []

        def hear(number: int, delta: Delta) -> None:
            started.add(number)
            if delta.finish_reason not in (None, "cancelled"):
                ended.append(delta.error or delta.finish_reason)

        most = SamplingParams(max_tokens=ask.most_tokens, ignore_eos=True)
        prompts = np.random.default_rng(_SEED).integers(0, engine.executor.vocab_size, (ask.batch, ask.context))
        requests = [engine.submit(ids, most, partial(hear, number)) for number, ids in enumerate(prompts.tolist())]
        rounds: list[Round] = []
        while len(rounds) < ask.warm + ask.rounds:
            decoding = len(started) == ask.batch  # no prompt is part of the step
            each = _round(engine, opened)
            if ended:
                raise EngineError(f"a request that ended ({ended[0]})", "rounds until all are measured", "report this")
            rounds += [each] if decoding else []
        for request in requests:
            engine.cancel(request)
        while engine.step():
            pass
        return rounds[ask.warm :]

    def close(self) -> None:
        """Close all engines, which ends the other ranks."""
        for opened in self._engines.values():
            opened.served.close()


def _round(engine: Engine, opened: Opened) -> Round:
    """One step of the engine."""
    opened.heard.seconds.clear()
    step, first = len(opened.llm.calls_ns), [len(each.calls_ns) for each in opened.ssms]
    began = time.perf_counter()
    engine.step()
    total_us = (time.perf_counter() - began) * 1e6
    spans = [(begin, len(each.calls_ns)) for begin, each in zip(first, opened.ssms, strict=True)]
    draft_us, verify_us = (opened.heard.seconds.get(kind, 0.0) * 1e6 for kind in ("draft", "verify"))
    return Round(total_us, draft_us, verify_us, step, spans)

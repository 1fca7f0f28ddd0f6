"""Runs rounds of an artifact as serving would and times each, for calibration and for measuring plans.

One process: rank 0 of a plan, or the only one. An engine for each draft plan, all over one LLM; requests have random
tokens, so that nothing is assumed about a text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from flexspec.compiler.artifact.model_record import LLM
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.draft_plan import DraftPlan, worst_case
from flexspec.drafters.record import ssm_names
from flexspec.errors import EngineError
from flexspec.runtime.drafters.budget import SpeculationSwitch
from flexspec.runtime.engine.api import Delta, RequestStats
from flexspec.runtime.executors.cpu import CpuExecutor
from flexspec.runtime.executors.step import Executor
from flexspec.runtime.executors.step_times import Clock, StepTimes
from flexspec.runtime.open.engine import open_artifact_engine
from flexspec.runtime.open.opening import Opening
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.runtime.open.served import Served
from flexspec.sampling import SamplingParams

_SEED = 7
_PROMPT_STEPS = 16  # rounds that a request may run while the prompts of others are read


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """Rounds to run."""

    draft: str
    batch: int  # requests
    context: int  # tokens of each request
    rounds: int
    warm: int  # rounds before those, which are not measured

    @property
    def most_tokens(self) -> int:
        """Tokens that a request may commit until all rounds have run."""
        return (self.warm + self.rounds + _PROMPT_STEPS) * (worst_case(DraftPlan.parse(self.draft)).max_depth + 1)

    @property
    def kv_tokens(self) -> int:
        """Cache slots of all requests together."""
        return self.batch * (self.context + self.most_tokens + worst_case(DraftPlan.parse(self.draft)).max_nodes + 64)


@dataclass(slots=True)
class MeasuredRound:
    """One round as rank 0 saw it."""

    total_us: float
    draft_us: float
    verify_us: float
    step: int  # of the LLM
    ssm_steps: list[tuple[int, int]]  # [from, to) of each SSM


@dataclass(slots=True)
class StepSeconds:
    """An observer of the engine that sums the times of the current round by kind."""

    seconds: dict[str, float] = field(default_factory=dict)

    def record_step(self, seconds: float, kind: str) -> None:
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def record_round(self, source: str, drafted: Sequence[int], accepted: Sequence[int], committed: int) -> None: ...

    def record_finished(self, reason: str, stats: RequestStats, first_token_s: float | None) -> None: ...

    def set_pages(self, free: int, total: int) -> None: ...

    def set_load(self, running: int, queued: int) -> None: ...


@dataclass(frozen=True, slots=True)
class TimedEngine:
    """The engine of a draft plan, and the times of its steps."""

    served: Served
    observer: StepSeconds
    llm: StepTimes  # of rank 0's shard
    ssms: list[StepTimes]


class RoundRuns:
    """``several``: the artifact's plan has other ranks, which all draft plans share."""

    def __init__(
        self, path: Path, options: ServeOptions, *, several: bool = False, clock: Clock = time.perf_counter
    ) -> None:
        self._options, self._several, self._clock = options, several, clock
        self._artifact = OpenedArtifact.at(path, check_digests=options.checks)
        self._ranks: tuple[Executor, StepTimes] | None = None
        self._engines: dict[str, TimedEngine] = {}

    def open(self, draft: str) -> TimedEngine:
        """The engine of a draft plan, opened at first use. Raises what open_engine raises."""
        if draft not in self._engines:
            observer = StepSeconds()
            options = replace(self._options, draft=draft)
            served = open_artifact_engine(self._artifact, options, observer, self._open_llm if self._several else None)
            llm, *ssms = served.executors
            llm_times = self._ranks[1] if self._ranks else self._keep_times(LLM, llm)
            names = [name for name in ssm_names() if name in served.draft.sources]  # in the order of executors
            ssm_times = [self._keep_times(name, ssm) for name, ssm in zip(names, ssms, strict=True)]
            self._engines[draft] = TimedEngine(served, observer, llm_times, ssm_times)
        return self._engines[draft]

    def _keep_times(self, part: str, executor: Executor) -> StepTimes:
        assert isinstance(executor, CpuExecutor)
        return executor.keep_times(len(self._artifact.graph(part).nodes))

    def _open_llm(self, opening: Opening) -> Executor:
        """The ranks' executor, opened once, with the options that the other ranks have."""
        if self._ranks is None:
            from flexspec.runtime.open.ranks import open_leader, times_of

            times: list[StepTimes] = []
            executor = open_leader(replace(opening, options=self._options), lambda shard: times.append(times_of(shard)))
            self._ranks = executor, times[0]
        return self._ranks[0]

    def run(self, request: RoundRequest) -> list[MeasuredRound]:
        """Fill the contexts, run rounds and return those after the warm ones. Raises EngineError if a request ends."""
        timed = self.open(request.draft)
        engine = timed.served.engine
        engine.speculation = SpeculationSwitch()  # other rounds must not switch drafting off in these
        started: set[int] = set()
        ended: list[str] = []

        def receive(number: int, delta: Delta) -> None:
            started.add(number)
            if delta.finish_reason not in (None, "cancelled"):
                ended.append(delta.error or delta.finish_reason)

        most = SamplingParams(max_tokens=request.most_tokens, ignore_eos=True)
        prompts = np.random.default_rng(_SEED).integers(0, engine.executor.vocab_size, (request.batch, request.context))
        submitted = [engine.submit(ids, most, partial(receive, number)) for number, ids in enumerate(prompts.tolist())]
        rounds: list[MeasuredRound] = []
        while len(rounds) < request.warm + request.rounds:
            decoding = len(started) == request.batch  # no prompt is part of the step
            measured = measured_round(engine.step, timed, self._clock)
            if ended:
                raise EngineError(f"a request that ended ({ended[0]})", "rounds until all are measured", "report this")
            rounds += [measured] if decoding else []
        for number in submitted:
            engine.cancel(number)
        while engine.step():
            pass
        return rounds[request.warm :]

    def close(self) -> None:
        """Close all engines, which ends the other ranks."""
        for opened in self._engines.values():
            opened.served.close()


def measured_round(step: Callable[[], object], timed: TimedEngine, clock: Clock) -> MeasuredRound:
    """One step of the engine; ``clock`` returns seconds."""
    timed.observer.seconds.clear()
    llm_step, first = len(timed.llm.calls_ns), [len(ssm.calls_ns) for ssm in timed.ssms]
    began = clock()
    step()
    total_us = (clock() - began) * 1e6
    spans = [(begin, len(ssm.calls_ns)) for begin, ssm in zip(first, timed.ssms, strict=True)]
    draft_us, verify_us = (timed.observer.seconds.get(kind, 0.0) * 1e6 for kind in ("draft", "verify"))
    return MeasuredRound(total_us, draft_us, verify_us, llm_step, spans)

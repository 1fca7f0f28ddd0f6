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

from flexspec.compiler.artifact import Artifact, open_artifact
from flexspec.compiler.model_record import PartRecord
from flexspec.errors import EngineError
from flexspec.runtime.api import Delta, RequestStats
from flexspec.runtime.cpu_executor import CpuExecutor
from flexspec.runtime.cpu_rank import CpuRank
from flexspec.runtime.drafters.budget import SpeculationWatch
from flexspec.runtime.drafters.plan import DraftPlan, worst_case
from flexspec.runtime.engine import Engine
from flexspec.runtime.open_engine import Served, ServeOptions, open_engine
from flexspec.runtime.step import Executor
from flexspec.runtime.step_times import StepTimes
from flexspec.sampling import SamplingParams
from flexspec.text import parse_graph

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


class RoundRuns:
    """``several``: other ranks of the artifact's plan run too. ``llm_times``: of the LLM, or of rank 0's shard."""

    def __init__(self, path: Path, options: ServeOptions, *, several: bool = False) -> None:
        self.path, self.options, self.several = path, options, several
        self.artifact = open_artifact(path, check_digests=False)
        self._llm: Executor | None = None
        self.llm_times: StepTimes | None = None
        self._engines: dict[str, tuple[Served, _Heard, list[StepTimes]]] = {}

    def open(self, draft: str) -> tuple[Served, _Heard, list[StepTimes]]:
        """The engine of a draft plan, made at first use."""
        if draft not in self._engines:
            heard = _Heard()
            first = None if self._llm is None and not self.several else self._open_llm
            served = open_engine(self.path, replace(self.options, draft=draft), heard, first)
            if self._llm is None:
                self._llm = served.executors[0]
            models = ["llm", *served.draft.sources]
            times = []
            for name, executor in zip(models[1:], served.executors[1:], strict=False):
                assert isinstance(executor, CpuExecutor)
                times.append(executor.keep_times(self._nodes(name)))
            if isinstance(self._llm, CpuExecutor) and self.llm_times is None:
                self.llm_times = self._llm.keep_times(self._nodes("llm"))
            self._engines[draft] = served, heard, times
        return self._engines[draft]

    def _nodes(self, part: str) -> int:
        return len(parse_graph(self.artifact.read_bytes(f"graph/{part}.fsg").decode()).nodes)

    def _open_llm(self, artifact: Artifact, llm: PartRecord, options: ServeOptions) -> Executor:
        if self._llm is None:
            from flexspec.runtime.distributed_open import open_leader

            self._llm = open_leader(artifact, llm, options, self._watch)
        return self._llm

    def _watch(self, shard: CpuRank) -> None:
        self.llm_times = shard.keep_times()

    def run(self, ask: Ask) -> list[Round]:
        """Fill the contexts and run rounds: those behind the warm ones. Raises EngineError when a request ends."""
        served, heard, ssm_times = self.open(ask.draft)
        engine = served.engine
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
            each = self._round(engine, heard, ssm_times)
            if ended:
                raise EngineError(f"a request that ended ({ended[0]})", "rounds until all are measured", "report this")
            rounds += [each] if decoding else []
        for request in requests:
            engine.cancel(request)
        while engine.step():
            pass
        return rounds[ask.warm :]

    def _round(self, engine: Engine, heard: _Heard, ssm_times: Sequence[StepTimes]) -> Round:
        """One step of the engine."""
        assert self.llm_times is not None
        heard.seconds.clear()
        step = len(self.llm_times.calls_ns)
        first = [len(each.calls_ns) for each in ssm_times]
        began = time.perf_counter()
        engine.step()
        total_us = (time.perf_counter() - began) * 1e6
        spans = [(begin, len(each.calls_ns)) for begin, each in zip(first, ssm_times, strict=True)]
        draft_us, verify_us = (heard.seconds.get(kind, 0.0) * 1e6 for kind in ("draft", "verify"))
        return Round(total_us, draft_us, verify_us, step, spans)

    def ssm_times(self, draft: str) -> list[StepTimes]:
        """Of the steps of each SSM with a draft plan, in the plan's order."""
        return self._engines[draft][2]

    def close(self) -> None:
        """Close the LLM, which ends the other ranks, and all SSMs."""
        for served, _, _ in self._engines.values():
            for executor in served.executors[1:]:
                executor.close()
        if self._llm is not None:
            self._llm.close()

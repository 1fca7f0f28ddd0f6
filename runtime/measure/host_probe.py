"""The host's work in a round outside the programs, measured by rounds of an artifact, for the planner.

A round costs ``round_us`` and ``request_us`` per request (accept, commit, schedule); each step of a program costs
``step_us`` to hand over, and an SSM's also ``step_request_us`` per request (packing, successors, growing its tree).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flexspec.runtime.executors.step_times import Clock, StepTimes, lower_quartile
from flexspec.runtime.measure.round_runs import MeasuredRound, RoundRequest, RoundRuns
from flexspec.runtime.open.serve_options import ServeOptions

_BATCHES = (1, 2, 4)
_DRAFTS = ("chain:4/sources=ssm", "tree:2,2,1/sources=ssm")
_CONTEXT_TOKENS, _ROUNDS, _WARM, _TURNS = 64, 10, 3, 3

Sample = tuple[float, float]  # (requests, microseconds)


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Microseconds of the host's work."""

    round_us: float  # of a round
    request_us: float  # of each request in it
    step_us: float  # of a program's step
    step_request_us: float | None  # of each request in an SSM's step; None without an SSM to measure it


@dataclass(slots=True)
class HostSamples:
    """Times outside the programs, of rounds of several batch sizes."""

    rounds: list[Sample] = field(default_factory=list)
    steps: list[Sample] = field(default_factory=list)  # those of the LLM have 0 requests: packing is in the round

    def add(self, batch: int, rounds: Sequence[MeasuredRound], llm: StepTimes, ssms: Sequence[StepTimes]) -> None:
        """Add measured rounds of ``batch`` requests, whose steps are in ``llm`` and ``ssms``."""
        self.rounds.append((batch, lower_quartile([r.total_us - r.draft_us - r.verify_us for r in rounds])))
        self.steps.append((0, lower_quartile(list(_around(llm, [(r.step, r.step + 1) for r in rounds])))))
        self.steps += [(batch, us) for us in _between(rounds, ssms)]

    def fit(self) -> HostTimes:
        round_us, request_us = line_fit(self.rounds)
        step_us, step_request_us = line_fit(self.steps)
        drafted = any(requests for requests, _ in self.steps)
        return HostTimes(round_us, request_us, step_us, step_request_us if drafted else None)


def probe_host(path: Path, clock: Clock = time.perf_counter) -> HostTimes:
    """Rounds of an artifact on one rank, with and without its SSM. Raises what open_engine raises."""
    requests = [
        RoundRequest(draft, batch, _CONTEXT_TOKENS, _ROUNDS, _WARM) for draft in _drafts(path) for batch in _BATCHES
    ]
    kv_tokens = max(request.kv_tokens for request in requests)
    options = ServeOptions(threads=1, kv_tokens=kv_tokens, max_requests=max(_BATCHES), measure=False, checks=False)
    runs = RoundRuns(path, options, clock=clock)
    samples = HostSamples()
    try:
        for _ in range(_TURNS):
            for request in requests:
                rounds, timed = runs.run(request), runs.open(request.draft)
                samples.add(request.batch, rounds, timed.llm, timed.ssms)
    finally:
        runs.close()
    return samples.fit()


def _drafts(path: Path) -> list[str]:
    from flexspec.compiler.artifact.opened import OpenedArtifact

    record = OpenedArtifact.at(path, check_digests=False).record
    return ["off", *(_DRAFTS if len(record.models) > 1 else ())]


def _between(rounds: Sequence[MeasuredRound], ssms: Sequence[StepTimes]) -> list[float]:
    """Microseconds of a drafting step outside its program."""
    if not ssms:
        return []
    spans = [[measured.ssm_steps[number] for measured in rounds] for number in range(len(ssms))]
    programs = np.sum([list(_inside(times, steps)) for times, steps in zip(ssms, spans, strict=True)], 0)
    counts = np.sum([[end - first for first, end in steps] for steps in spans], 0)
    drafts = np.array([measured.draft_us for measured in rounds])
    return [lower_quartile((drafts - programs) / np.maximum(counts, 1))]


def _inside(times: StepTimes, spans: Sequence[tuple[int, int]]) -> Iterator[float]:
    """Microseconds in the program, summed over each span of steps."""
    for first, end in spans:
        yield sum(float(stamps.max() - stamps[0]) for stamps in times.stamps_ns[first:end]) / 1e3


def _around(times: StepTimes, spans: Sequence[tuple[int, int]]) -> Iterator[float]:
    """Microseconds of each span of steps outside the program."""
    for span, inside in zip(spans, _inside(times, spans), strict=True):
        yield sum(ended - began for began, ended in times.calls_ns[slice(*span)]) / 1e3 - inside


def line_fit(samples: Sequence[Sample]) -> tuple[float, float]:
    """(constant, per request) of least squares, neither below 0."""
    x, y = np.array(samples, np.float64).T
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / max(((x - x.mean()) ** 2).sum(), 1e-9))
    slope = max(0.0, slope)
    return max(0.0, float(y.mean() - slope * x.mean())), slope

"""Runs plans on this machine, all of them turn by turn, and measures their rounds line by line.

Every layout of stages becomes an artifact and a group of processes, one a rank with one thread each; trials on the same
stages share it. Groups stay open and wait while another one runs, so that all plans meet the machine's slow moments.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.model_record import LLM
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.compiler.artifact.plan import Plan, Stage
from flexspec.compiler.pages.predicted_lines import (
    ALL,
    BETWEEN,
    DRAFT,
    HOST,
    MESSAGES,
    Line,
    Outcome,
    Trial,
    predicted_lines,
)
from flexspec.compiler.prices.problem import Problem
from flexspec.draft_plan import DraftLadder, DraftPlan
from flexspec.errors import EngineError, PlanError
from flexspec.kernels.cpu.build import supported_isas
from flexspec.kernels.cpu.exchange import split_logits
from flexspec.kernels.package.compile_model import CompileOptions, compile_model
from flexspec.runtime.local_ranks import rank_environments
from flexspec.runtime.measure.plan_process import Job, times_file
from flexspec.runtime.measure.round_runs import Ask
from flexspec.runtime.measure.stamps import RankTimes, Steps, complete, draft_lines, quartile_mean, verify_lines
from flexspec.types import DType

Progress = Callable[[str, int, int], None]
_ENDS_WITHIN_S = 60


@dataclass(frozen=True, slots=True)
class Models:
    """What is compiled: files with weights."""

    llm: Path
    ssms: tuple[Path, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Effort:
    """``turns`` times ``rounds`` rounds of each trial are measured, each turn after ``warm`` others."""

    turns: int = 5
    rounds: int = 10
    warm: int = 2


@dataclass(slots=True)
class _Group:
    """The processes of one layout, and the rounds of each trial so far."""

    stages: tuple[Stage, ...]
    artifact: Path
    job: Job
    trials: list[Trial]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    rounds: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by the trial's place in ``trials``


def run_trials(
    problem: Problem, models: Models, trials: Sequence[Trial], effort: Effort, progress: Progress
) -> list[Outcome]:
    """Compile, run and measure all trials; outcomes in their order.

    Raises what compile_model raises, and EngineError when a plan cannot be run.
    """
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="flexspec-compare-")))
        groups = _groups(problem, models, trials, effort, folder, progress)
        for group in groups:
            opened.enter_context(_running(group))
        total = effort.turns * len(trials)
        done = 0
        for _ in range(effort.turns):
            for group in groups:
                for number, trial in enumerate(group.trials):
                    progress("running plans", done, total)
                    asked = _ask(problem, trial, effort)
                    group.rounds.setdefault(number, []).extend(_answer(group, asked))
                    done += 1
        progress("running plans", total, total)
        for group in groups:
            _end(group)
        found = {id(trial): each for group in groups for trial, each in _outcomes(problem, group)}
    return [found[id(trial)] for trial in trials]


def _groups(
    problem: Problem, models: Models, trials: Sequence[Trial], effort: Effort, folder: Path, progress: Progress
) -> list[_Group]:
    """An artifact for each layout of stages, with SSMs and without, compiled for this machine alone."""
    layouts = list(dict.fromkeys((trial.stages, trial.place.name != "none") for trial in trials))
    groups = []
    for number, (stages, drafts) in enumerate(layouts):
        progress("compiling plans", number, len(layouts))
        ssms = models.ssms if drafts else ()
        plan = Plan(stages, ((0,),) * len(ssms), DraftLadder.of(DraftPlan("off")), "hand")
        several = sum(stage.degree for stage in stages) > 1
        options = CompileOptions(models.dtype, isas=supported_isas()[:1], plan=plan if several else None)
        path, _ = compile_model(
            models.llm, ssms, folder / f"{number}{layout.SUFFIX}", options, argv=["flexspec", "plan", "--compare"]
        )
        own = [trial for trial in trials if (trial.stages, trial.place.name != "none") == (stages, drafts)]
        times = folder / f"times{number}"
        times.mkdir()
        groups.append(_Group(stages, path, _job(problem, own, effort, path, times), own))
    progress("compiling plans", len(layouts), len(layouts))
    return groups


def _job(problem: Problem, trials: Sequence[Trial], effort: Effort, artifact: Path, times: Path) -> Job:
    """Room for the largest trial."""
    tokens = max(_ask(problem, trial, effort).kv_tokens for trial in trials)
    requests = max(trial.batch for trial in trials)
    return Job(str(artifact), str(times), tokens, requests, max(256, max(trial.rows for trial in trials)))


def _ask(problem: Problem, trial: Trial, effort: Effort) -> Ask:
    ask = Ask(str(trial.entry.draft), trial.batch, problem.context_tokens, effort.rounds, effort.warm)
    positions = problem.llm.config.max_positions
    if ask.context + ask.most_tokens > positions:
        raise PlanError(
            f"a context of {ask.context} tokens, and {ask.most_tokens} to be made while rounds are measured",
            f"at most {positions} together, the model's positions", "choose a smaller --context",
        )  # fmt: skip
    return ask


@contextmanager
def _running(group: _Group) -> Iterator[None]:
    """The group's processes, gone at the end whatever happens."""
    ranks = sum(stage.degree for stage in group.stages)
    command = [sys.executable, "-m", "flexspec.runtime.measure.plan_process", json.dumps(asdict(group.job))]
    try:
        for rank, env in enumerate(rank_environments(ranks)):
            pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            group.processes.append(
                subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.PIPE, text=True)
            )
        yield
    finally:
        for process in group.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def _answer(group: _Group, ask: Ask) -> list[dict[str, Any]]:
    leader = group.processes[0]
    assert leader.stdin is not None and leader.stdout is not None
    try:
        leader.stdin.write(json.dumps(asdict(ask)) + "\n")
        leader.stdin.flush()
    except BrokenPipeError:
        raise _failed(group) from None
    line = leader.stdout.readline()
    if not line:
        raise _failed(group)
    rounds: list[dict[str, Any]] = json.loads(line)
    return rounds


def _failed(group: _Group) -> EngineError:
    said = []
    for process in group.processes:
        process.kill()
        said += process.communicate()[1].strip().splitlines()[-1:]
    return EngineError(f"a plan that does not run: {'; '.join(said)}", "rounds to measure", "report this")


def _end(group: _Group) -> None:
    """Have all ranks leave their times."""
    leader = group.processes[0]
    assert leader.stdin is not None
    leader.stdin.close()
    for process in group.processes:
        try:
            process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise _failed(group) from None
        if process.returncode:
            raise _failed(group)


def _outcomes(problem: Problem, group: _Group) -> Iterator[tuple[Trial, Outcome]]:
    artifact = OpenedArtifact.at(group.artifact, check_digests=False)
    several = bool(artifact.ranks)
    for number, trial in enumerate(group.trials):
        rounds = group.rounds[number]
        steps = np.array([each["step"] for each in rounds])

        def rank_times(rank: int, steps: Any = steps, draft: str = str(trial.entry.draft)) -> RankTimes:
            graph = artifact.graph(layout.rank_name(rank) if several else LLM)
            file = times_file(group.job, f"rank{rank}") if rank else times_file(group.job, "llm.", draft)
            return RankTimes.of(split_logits(graph)[0], _load(file), steps)

        lines = verify_lines([[rank_times(rank) for rank in stage.ranks] for stage in group.stages])
        drafts = trial.entry.draft
        parts = [
            part.name for part in artifact.record.models[1:] if part.name in drafts.sources and drafts.method != "off"
        ]
        for place, part in enumerate(parts):
            graph = artifact.graph(part)
            spans = [tuple(each["ssm_steps"][place]) for each in rounds]
            arrays = _load(times_file(group.job, f"ssm{place}.", str(trial.entry.draft)))
            for line, values in draft_lines(graph, arrays, spans).items():
                lines[line] = lines.get(line, 0.0) + values
        measured, count = quartile_mean(_whole_rounds(lines, rounds, several))
        yield trial, Outcome(trial, predicted_lines(problem, trial), measured, count)


def _load(path: Path) -> dict[str, Any]:
    with np.load(path) as data:
        return {key: data[key] for key in data.files}


def _whole_rounds(lines: dict[Line, Steps], rounds: Sequence[dict[str, Any]], several: bool) -> dict[Line, Steps]:
    """The lines with what the parts have beside what was stamped: between drafting steps, messages, the host."""
    total, draft, verify = (np.array([each[key] for each in rounds]) for key in ("total_us", "draft_us", "verify_us"))
    stages = np.sum([values for (part, _), values in lines.items() if part != DRAFT], 0)
    if draft.any():
        complete(lines, DRAFT, BETWEEN, draft)
    if several:
        lines[MESSAGES, ALL] = verify - stages
        stages = verify
    lines[HOST, ALL] = total - draft - stages
    return lines

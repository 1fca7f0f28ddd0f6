"""Runs plans on this machine, interleaved, and measures their rounds line by line.

Every layout of stages becomes an artifact and a group of processes, one per rank with one thread each; trials on the
same stages share it. Groups stay open and wait while another one runs, so that slow moments affect all plans.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
from flexspec.kernels.package.compile_model import compile_model
from flexspec.kernels.package.options import CompileOptions
from flexspec.progress import Progress
from flexspec.runtime.distributed.processes import RankProcesses, RanksFailed, start_ranks
from flexspec.runtime.measure.plan_process import PlanProcess, times_file
from flexspec.runtime.measure.round_runs import MeasuredRound, RoundRequest
from flexspec.runtime.measure.stamps import RankTimes, Steps, complete, draft_lines, quartile_mean, verify_lines
from flexspec.types import DType, WeightFormat

_ENDS_WITHIN_S = 60


@dataclass(frozen=True, slots=True)
class Models:
    """The models to compile: files with weights."""

    llm: Path
    ssms: tuple[Path, ...]
    dtype: DType
    weights: WeightFormat | None = None  # how matrices are stored; None: in dtype


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured of each trial."""

    turns: int = 5
    rounds: int = 10  # per turn
    warm: int = 2  # rounds before those, which are not measured


@dataclass(slots=True)
class _Group:
    """The trials of one layout of stages, and the rounds of each so far."""

    stages: tuple[Stage, ...]
    artifact: Path
    setup: PlanProcess
    trials: list[Trial]
    rounds: dict[int, list[MeasuredRound]] = field(default_factory=dict)  # by the trial's place in ``trials``


def run_trials(
    problem: Problem, models: Models, trials: Sequence[Trial], effort: Effort, progress: Progress
) -> list[Outcome]:
    """Compile, run and measure all trials; outcomes in their order.

    Raises what compile_model raises, and EngineError when a plan cannot be run.
    """
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="flexspec-compare-")))
        groups = _groups(problem, models, trials, effort, folder, progress)
        opened.enter_context(_rank_errors())
        processes = [opened.enter_context(_start(group)) for group in groups]
        total = effort.turns * len(trials)
        done = 0
        for _ in range(effort.turns):
            for group, ranks in zip(groups, processes, strict=True):
                for number, trial in enumerate(group.trials):
                    progress("running plans", done, total)
                    answer = ranks.ask(json.dumps(asdict(_round_request(problem, trial, effort))))
                    group.rounds.setdefault(number, []).extend(
                        MeasuredRound(**measured) for measured in json.loads(answer)
                    )
                    done += 1
        progress("running plans", total, total)
        for ranks in processes:
            ranks.finish(_ENDS_WITHIN_S)  # they leave their times
        outcomes = {id(trial): outcome for group in groups for trial, outcome in _outcomes(problem, group)}
    return [outcomes[id(trial)] for trial in trials]


def _groups(
    problem: Problem, models: Models, trials: Sequence[Trial], effort: Effort, folder: Path, progress: Progress
) -> list[_Group]:
    """An artifact for each layout of stages, with SSMs and without, compiled for this machine only."""
    layouts = list(dict.fromkeys((trial.stages, trial.place.drafts) for trial in trials))
    groups = []
    for number, (stages, drafts) in enumerate(layouts):
        progress("compiling plans", number, len(layouts))
        ssms = models.ssms if drafts else ()
        plan = Plan(stages, ((0,),) * len(ssms), DraftLadder.of(DraftPlan("off")), "hand")
        several = sum(stage.degree for stage in stages) > 1
        options = CompileOptions(
            models.dtype, isas=supported_isas()[:1], plan=plan if several else None, weights=models.weights
        )
        path, _ = compile_model(
            models.llm, ssms, folder / f"{number}{layout.SUFFIX}", options, argv=["flexspec", "plan", "--compare"]
        )
        sharing = [trial for trial in trials if (trial.stages, trial.place.drafts) == (stages, drafts)]
        times = folder / f"times{number}"
        times.mkdir()
        groups.append(_Group(stages, path, _setup(problem, sharing, effort, path, times), sharing))
    progress("compiling plans", len(layouts), len(layouts))
    return groups


def _setup(problem: Problem, trials: Sequence[Trial], effort: Effort, artifact: Path, times: Path) -> PlanProcess:
    """Room for the largest trial."""
    tokens = max(_round_request(problem, trial, effort).kv_tokens for trial in trials)
    requests = max(trial.batch for trial in trials)
    return PlanProcess(str(artifact), str(times), tokens, requests, max(256, max(trial.rows for trial in trials)))


def _round_request(problem: Problem, trial: Trial, effort: Effort) -> RoundRequest:
    request = RoundRequest(str(trial.entry.draft), trial.batch, problem.context_tokens, effort.rounds, effort.warm)
    positions = problem.llm.config.max_positions
    if request.context + request.most_tokens > positions:
        raise PlanError(
            f"a context of {request.context} tokens, and {request.most_tokens} generated while rounds are measured",
            f"at most {positions} together, the model's positions", "choose a smaller --context",
        )  # fmt: skip
    return request


def _start(group: _Group) -> AbstractContextManager[RankProcesses]:
    ranks = sum(stage.degree for stage in group.stages)
    return start_ranks("flexspec.runtime.measure.plan_process", [json.dumps(asdict(group.setup))], ranks)


@contextmanager
def _rank_errors() -> Iterator[None]:
    """Raise a failure of ranks as EngineError."""
    try:
        yield
    except RanksFailed as error:
        raise EngineError(f"a plan that does not run: {error}", "rounds to measure", "report this") from None


def _outcomes(problem: Problem, group: _Group) -> Iterator[tuple[Trial, Outcome]]:
    artifact = OpenedArtifact.at(group.artifact, check_digests=False)
    several = bool(artifact.ranks)
    for number, trial in enumerate(group.trials):
        rounds = group.rounds[number]
        steps = np.array([measured.step for measured in rounds])

        def rank_times(rank: int, steps: Any = steps, draft: str = str(trial.entry.draft)) -> RankTimes:
            graph = artifact.graph(layout.rank_name(rank) if several else LLM)
            file = times_file(group.setup, f"rank{rank}") if rank else times_file(group.setup, "llm.", draft)
            return RankTimes.of(split_logits(graph)[0], _load(file), steps)

        lines = verify_lines([[rank_times(rank) for rank in stage.ranks] for stage in group.stages])
        drafts = trial.entry.draft
        parts = [
            part.name for part in artifact.record.models[1:] if part.name in drafts.sources and drafts.method != "off"
        ]
        for place, part in enumerate(parts):
            graph = artifact.graph(part)
            spans = [measured.ssm_steps[place] for measured in rounds]
            arrays = _load(times_file(group.setup, f"ssm{place}.", str(trial.entry.draft)))
            for line, values in draft_lines(graph, arrays, spans).items():
                lines[line] = lines.get(line, 0.0) + values
        means, count = quartile_mean(complete_rounds(lines, rounds, several))
        yield trial, Outcome(trial, predicted_lines(problem, trial), means, count)


def _load(path: Path) -> dict[str, Any]:
    with np.load(path) as data:
        return {key: data[key] for key in data.files}


def complete_rounds(lines: dict[Line, Steps], rounds: Sequence[MeasuredRound], several: bool) -> dict[Line, Steps]:
    """The lines, completed by what has no stamps: between drafting steps, messages, the host."""
    total, draft, verify = np.array([(r.total_us, r.draft_us, r.verify_us) for r in rounds]).T
    stages = np.sum([values for (part, _), values in lines.items() if part != DRAFT], 0)
    if draft.any():
        complete(lines, DRAFT, BETWEEN, draft)
    if several:
        lines[MESSAGES, ALL] = verify - stages
        stages = verify
    lines[HOST, ALL] = total - draft - stages
    return lines

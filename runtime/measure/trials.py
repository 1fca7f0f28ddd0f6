"""Which plans are compared with their prediction: those of plan files, or a list for the machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path

from flexspec.compiler.artifact.plan import Stage
from flexspec.compiler.artifact.ssm_place import FirstStage, NoSsm
from flexspec.compiler.pages.predicted_lines import Trial
from flexspec.compiler.planner.plan_file import check_runnable, read_hand_plan, read_plan, wrong
from flexspec.compiler.planner.score_plan import stage_cuts
from flexspec.compiler.prices.acceptance_profile import OFF, DraftEntry
from flexspec.compiler.prices.problem import Problem
from flexspec.compiler.prices.rounds import Cut
from flexspec.draft_plan import DraftPlan
from flexspec.drafters.record import ssm_names
from flexspec.errors import MachineError, PlanError, ToolchainError
from flexspec.host.cores import usable_cores

NO_DRAFT = DraftPlan("off")
CHAIN, TREE = DraftPlan.parse("chain:4/sources=ssm"), DraftPlan.parse("tree:2,2,1/sources=ssm")
_STATIC = "chain:DEPTH or tree:K1,K2,... with an SSM, whose rows are known, or one of the acceptance profile"


def trials_of_files(problem: Problem, paths: Sequence[Path]) -> list[Trial]:
    """A trial for each rung of every plan's ladder, up to the problem's requests. Raises PlanError."""
    trials: list[Trial] = []
    for path in paths:
        plan = read_plan(path, len(problem.ssms), CHAIN if problem.ssms else NO_DRAFT)
        check_runnable(plan, problem.llm.blocks, len(problem.ssms) if plan.ssm_ranks else 0)
        if any(ranks != (0,) for ranks in plan.ssm_ranks) or any(count > 1 for count in plan.micro_batches):
            raise wrong(
                f"{path}: SSMs on ranks {list(plan.ssm_ranks)}, micro-batches {list(plan.micro_batches)}",
                "SSMs on rank 0 and one micro-batch: overlapping work cannot be attributed yet",
            )
        cuts = stage_cuts(problem, read_hand_plan(path, problem.requests))
        for batch in dict.fromkeys(min(batch, problem.requests) for batch, _ in plan.ladder.rungs):
            draft = plan.ladder.for_batch(batch) if plan.ssm_ranks else NO_DRAFT
            trials.append(_trial(problem, plan.stages, cuts, draft, batch))
    return trials


def trials_of_machine(problem: Problem) -> list[Trial]:
    """One rank, two pipelines, tensor parallelism, as far as cores and model allow; with and without drafts."""
    blocks, most = problem.llm.blocks, problem.requests
    room = min(max(kind.devices for kind in problem.machine.kinds), usable_cores())
    parallel = room > 1 and 2 in problem.legal_degrees
    layouts: list[list[tuple[int, int]]] = [[(blocks, 1)]]  # (blocks, degree) of each stage
    if room > 1:
        layouts += [[(first, 1), (blocks - first, 1)] for first in dict.fromkeys((blocks // 2, blocks // 4)) if first]
    layouts += [[(blocks, 2)]] if parallel else []
    layouts += [[(blocks // 2, 2), (blocks - blocks // 2, 1)]] if parallel and room > 2 and blocks > 1 else []
    ways = [(NO_DRAFT, 1), (NO_DRAFT, most)]
    ways += [(CHAIN, min(2, most)), (TREE, 1), (TREE, most)] if problem.ssms else []
    trials: list[Trial] = []
    for layout in layouts:
        stages, cuts = _stages(layout), tuple(Cut(0, degree, count, False) for count, degree in layout)
        trials += [_trial(problem, stages, cuts, draft, batch) for draft, batch in dict.fromkeys(ways)]
    return trials


def check_trials(problem: Problem, trials: Iterable[Trial], models: Iterable[Path]) -> None:
    """Refuse trials that cannot run on this machine. Raises PlanError, MachineError, ToolchainError."""
    for path in models:
        if path.suffix == ".json":
            raise PlanError(f"{path}, a model without weights", "a model that can run", "name its folder or .gguf file")
    other = next((kind.device for kind in problem.machine.kinds if not kind.device.processor.has_step_clock), None)
    if other is not None:
        raise MachineError(
            f"machine {problem.machine.name} of {other.name}, no CPU", "a machine file of this machine",
            "flexspec calibrate writes one; plans on other machines can be priced, not run here",
        )  # fmt: skip
    most = max(trial.ranks for trial in trials)
    if most > usable_cores():
        raise PlanError(
            f"a plan of {most} ranks", f"at most {usable_cores()}, a core each", "compare plans of fewer ranks"
        )
    if most > 1 and importlib.util.find_spec("torch") is None:
        raise ToolchainError(f"{most} ranks without PyTorch", "torch >= 2.11", "pip install torch")


def draft_entry(problem: Problem, plan: DraftPlan) -> DraftEntry:
    """The actual rows of a draft plan's round; its tokens per round do not matter. Raises PlanError."""
    known = next((entry for entry in problem.entries if entry.draft == plan), None)
    if plan.method == "off":
        return OFF
    if plan.method not in ("chain", "tree") or not set(plan.sources) <= set(ssm_names()[: len(problem.ssms)]):
        if known is None:
            raise PlanError(f"draft plan {plan} to compare", _STATIC, f"choose {CHAIN}, for example")
        return known
    copies = len(plan.sources) if plan.method == "tree" else 1  # each SSM adds a tree of its own
    levels = plan.expansion.level_sizes()
    caught_up = known.ssm_rows[0] if known else 1.0  # what the last round committed
    return DraftEntry(plan, tuple(float(copies * size) for size in levels), 1.0, (caught_up, *_fed_rows(levels)))


def _fed_rows(levels: Sequence[int]) -> list[float]:
    """Rows of the SSM's steps after its first: branching levels are fed again, an unbranched stem is not."""
    rows: list[float] = []
    fed = 0
    for size in levels[:-1]:
        fed += size
        rows.append(float(fed))
        fed = 0 if fed == 1 else fed
    return rows


def _trial(problem: Problem, stages: tuple[Stage, ...], cuts: tuple[Cut, ...], draft: DraftPlan, batch: int) -> Trial:
    entry = draft_entry(problem, draft)
    shape = " + ".join(f"TP{cut.degree} x {cut.blocks}" for cut in cuts)
    return Trial(
        f"{shape}; {draft}", stages, cuts, NoSsm() if entry is OFF else FirstStage(), entry, batch
    )  # fmt: skip


def _stages(layout: Sequence[tuple[int, int]]) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    ranks = 0
    for count, degree in layout:
        first = stages[-1].end_block if stages else 0
        stages.append(Stage(first, first + count, tuple(range(ranks, ranks + degree))))
        ranks += degree
    return tuple(stages)

"""``flexspec plan ... --compare``: run plans on this machine and print predicted, measured and ratio."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexspec.compiler.prices.problem import Problem


def compare(args: argparse.Namespace, problem: Problem) -> int:
    """Run the plans of ``args.compare``, or the built-in list if it names none."""
    from flexspec.cli.planning.options import TURNS
    from flexspec.cli.progress import progress_bars
    from flexspec.compiler.pages.compare_page import compare_json, compare_page
    from flexspec.errors import PlanError
    from flexspec.runtime.measure.run_plans import Effort, Models, run_trials
    from flexspec.runtime.measure.trials import check_trials, trials_of_files, trials_of_machine

    turns = TURNS if args.turns is None else args.turns
    if not 1 <= turns <= 1000:
        raise PlanError(f"--turns {turns}", "1 to 1000", "choose a number in that range")
    trials = trials_of_files(problem, args.compare) if args.compare else trials_of_machine(problem)
    check_trials(problem, trials, (args.model, *args.ssm))
    effort = Effort(turns=turns)
    models = Models(args.model, tuple(args.ssm), problem.llm.dtype, problem.llm.weights)
    with progress_bars() as progress:
        outcomes = run_trials(problem, models, trials, effort, progress)
    if args.json:
        print(json.dumps(compare_json(outcomes), indent=1))
        return 0
    today = datetime.date.today().isoformat()
    llm = problem.llm
    about = (
        f"{llm.name} on {problem.machine.name}, {llm.precision}, context {problem.context_tokens}, {today}: "
        f"{effort.turns} turns of {effort.rounds} rounds each, around their lower quartile"
    )
    sys.stdout.write(compare_page(outcomes, about))
    return 0

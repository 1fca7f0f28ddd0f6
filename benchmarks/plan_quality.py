"""Plans of every shipped machine against the best plan of equal stages and speculation off, and the search time.

No model runs: it prices plans. "uniform" is the best plan with one degree, equal stages and any SSM place and tree, by
the same prices. Run:

    python benchmarks/plan_quality.py
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flexspec.compiler.artifact.ssm_place import NoSsm  # noqa: E402
from flexspec.compiler.planner.explain import describe  # noqa: E402
from flexspec.compiler.planner.plan_choice import uniform_plans  # noqa: E402
from flexspec.compiler.planner.search import Candidate, search  # noqa: E402
from flexspec.compiler.prices.acceptance_profile import open_acceptance  # noqa: E402
from flexspec.compiler.prices.machine import open_machine, shipped_machines  # noqa: E402
from flexspec.compiler.prices.plan_models import open_profile  # noqa: E402
from flexspec.compiler.prices.problem import Problem  # noqa: E402
from flexspec.errors import PlanError  # noqa: E402
from flexspec.types import DType  # noqa: E402

CONFIGS = ROOT / "examples" / "configs"
SPECINFER = (  # the paper's set-ups: model, SSM, machine (section 6.1)
    ("llama-7b", "llama-68m", "a10"),
    ("opt-30b", "opt-125m", "a10x4"),
    ("llama-65b", "llama-68m", "a10x4x2"),
)


def problem_for(machine_name: str, model: str, ssm: str, objective: str, requests: int) -> Problem:
    machine = open_machine(machine_name)
    degrees = tuple(d for d in (1, 2, 4, 8) if d <= max(kind.devices for kind in machine.kinds))
    llm = open_profile(CONFIGS / f"{model}.json", DType.BF16, degrees)
    ssms = (open_profile(CONFIGS / f"{ssm}.json", DType.BF16, ssm=True),)
    entries = open_acceptance("specinfer-llama-7b").entries
    return Problem(machine, llm, ssms, entries, requests, 512, objective, degrees=degrees)


def row(problem: Problem) -> str:
    """A line of the table: machine, model, objective, best plan, uniform over best, off over best, seconds."""
    head = f"| {problem.machine.name} | {problem.llm.name} | {problem.objective}, {problem.requests} "
    start = time.process_time()
    try:
        best = search(problem)[0]
    except PlanError:
        return f"{head}| does not fit | | | |"
    seconds = time.process_time() - start
    by_hand = uniform_plans(problem)
    uniform = f"{by_hand[0].value_us / best.value_us:.3f}" if by_hand else "none fits"
    try:
        off = f"{search(problem, places=[NoSsm()])[0].value_us / best.value_us:.2f}"
    except PlanError:
        off = "none fits"
    return f"{head}| {plan_words(problem, best)} | {uniform} | {off} | {seconds:.2f} |"


def plan_words(problem: Problem, plan: Candidate) -> str:
    return f"{describe(problem, plan)}; {str(plan.entry.draft).split('/')[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    args = parser.parse_args()
    print("| machine | model | objective, requests | best plan | uniform / best | off / best | search, s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model, ssm, machine in SPECINFER:
        for requests in (1, args.requests):
            print(row(problem_for(machine, model, ssm, "latency", requests)), flush=True)
    for machine in shipped_machines():
        for objective in ("latency", "throughput"):
            model = "llama-7b" if open_machine(machine).devices <= 4 else "llama-2-70b"
            print(row(problem_for(machine, model, "llama-68m", objective, args.requests)), flush=True)


if __name__ == "__main__":
    main()

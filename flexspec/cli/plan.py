"""``flexspec plan MODEL [--ssm SSM]... --machine M``: search, prove, explain, draw or price a parallel plan."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexspec.host.files import write_file

if TYPE_CHECKING:
    from flexspec.compiler.artifact.plan import Plan
    from flexspec.compiler.prices.acceptance_profile import AcceptanceProfile
    from flexspec.compiler.prices.problem import Problem

EPILOG = """\
MODEL and SSM need no weights: a bare config.json is enough. M is a TOML file or the name of a shipped one (`--machine
list` prints the names). A shipped acceptance profile is found by the SSM's name.

example:
  flexspec plan examples/configs/llama-65b.json --ssm examples/configs/llama-68m.json --machine a10x4x2 --prove
  flexspec plan examples/configs/llama-2-70b.json --machine h100x8 --requests 32 --objective throughput
  flexspec plan build/models/SmolLM2-135M-Instruct.Q4_1.gguf --ssm ssm/smollm2-135m --machine cpu2 --compare
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from flexspec.cli.options.dtype import add_dtype_options

    parser.epilog = EPILOG
    parser.add_argument("model", type=Path, nargs="?", help="a config.json, a Hugging Face folder or a .gguf file")
    parser.add_argument(
        "--ssm", type=Path, action="append", default=[], help="an SSM, in the same forms; may be repeated"
    )
    parser.add_argument(
        "--machine", required=True, help="a machine file, or the name of a shipped one; list: print the names"
    )
    parser.add_argument("--acceptance", help="acceptance profile: a JSON file, or the name of a shipped one")
    parser.add_argument("--requests", type=int, default=1, help="maximum number of concurrent requests (default 1)")
    parser.add_argument(
        "--context", type=int, default=1024, help="context length of each request, in tokens (default 1024)"
    )
    parser.add_argument(
        "--objective",
        choices=("latency", "throughput", "goodput"),
        default="latency",
        help="lowest ms per token (default), highest tokens/s, or highest tokens/s within --limit-ms",
    )
    parser.add_argument("--limit-ms", type=float, help="highest allowed ms per token of a request, for goodput")
    add_dtype_options(parser)
    parser.add_argument(
        "--degrees", help="TP degrees to try, e.g. 1,2,3 (default: powers of two up to the devices of a node)"
    )
    parser.add_argument("--prove", action="store_true", help="check that the plan is optimal, with separate code")
    parser.add_argument(
        "--pareto", action="store_true", help="print all Pareto-optimal plans of ms per token and tokens/s"
    )
    parser.add_argument(
        "--score", type=Path, metavar="PLAN", help="price a hand-written plan (TOML) or an edited one (JSON)"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="*",
        metavar="PLAN",
        help="run these plans (TOML or JSON; none: a built-in list) on this machine and print predicted and measured "
        "times; plans with several micro-batches, or with SSMs on ranks other than 0, are not supported yet",
    )
    parser.add_argument("--turns", type=int, help="number of times --compare runs each plan (default 5)")
    parser.add_argument("--svg", type=Path, help="draw the plan to this file")
    parser.add_argument("-o", "--output", type=Path, help="write the plan as JSON to this file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the page")


def run(args: argparse.Namespace) -> int:
    if args.machine == "list":
        return _list_machines()
    from flexspec.cli.planning.options import check_options

    check_options(args)
    arguments = _plan_arguments(args)
    if args.compare is not None or args.pareto or args.score:
        from flexspec.api.plan import PlanQuestion

        problem, acceptance = PlanQuestion(**arguments).open(times_only=args.compare is not None)
        return _without_search(args, problem, acceptance)
    from flexspec.api.plan import plan

    best = plan(**arguments, prove=args.prove)
    if args.json:
        print(json.dumps(best.to_json(), indent=1))
    else:
        sys.stdout.write(best.page())
    if args.svg:
        _write(args.svg, best.svg(), "picture")
    _save(args, best.plan)
    return 0


def _without_search(args: argparse.Namespace, problem: Problem, acceptance: AcceptanceProfile | None) -> int:
    """The options that need the problem but no search."""
    if args.compare is not None:
        from flexspec.cli.planning.compare import compare

        return compare(args, problem)
    return _pareto(problem, args.json) if args.pareto else _score(args, problem, acceptance)


def _list_machines() -> int:
    from flexspec.compiler.prices.machine import open_machine, shipped_machines

    for name in shipped_machines():
        print(f"{name:10s} {open_machine(name).about}")
    return 0


def _plan_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``flexspec.plan``."""
    from flexspec.errors import PlanError

    if args.model is None:
        raise PlanError("no model", "a config.json, a Hugging Face folder or a .gguf file", "pass one")
    names = (
        "model",
        "machine",
        "ssm",
        "acceptance",
        "requests",
        "context",
        "objective",
        "limit_ms",
        "dtype",
        "weights",
    )
    return {**{name: getattr(args, name) for name in names}, "degrees": _degrees(args.degrees)}


def _degrees(text: str | None) -> tuple[int, ...]:
    from flexspec.errors import PlanError

    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.strip().isdigit() and 1 <= int(part) <= 64 for part in parts):
        raise PlanError(f"--degrees {text}", "whole numbers from 1 to 64, separated by commas", "pass --degrees 1,2,4")
    return tuple(int(part) for part in parts)


def _pareto(problem: Problem, as_json: bool) -> int:
    from flexspec.compiler.planner.explain import describe
    from flexspec.compiler.planner.search import no_plan, pareto_front

    front = pareto_front(problem)
    if not front:
        raise no_plan(problem)
    if as_json:
        rows = [
            {"ms_per_token": c.per_token_us / 1e3, "tokens_per_s": c.tokens_per_s, "batch": c.batch,
             "micro_batches": c.micro_batches, "draft": str(c.entry.draft), "plan": describe(problem, c)} for c in front
        ]  # fmt: skip
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{'ms a token':>10s}  {'tokens/s':>9s}  batch")
    for c in front:
        rates = f"{c.per_token_us / 1e3:10.2f}  {c.tokens_per_s:9.1f}  {c.batch:5d}"
        print(f"{rates}  {c.entry.draft}; {describe(problem, c)}")
    return 0


def _score(args: argparse.Namespace, problem: Problem, acceptance: AcceptanceProfile | None) -> int:
    from flexspec.compiler.pages.plan_page import plan_json, score_page
    from flexspec.compiler.pages.plan_view import PlanView
    from flexspec.compiler.planner.plan_file import read_hand_plan
    from flexspec.compiler.planner.score_plan import hand_layout, priced_plan, score_plan
    from flexspec.compiler.planner.search import search
    from flexspec.errors import PlanError

    hand = read_hand_plan(args.score, problem.requests)
    plan = score_plan(problem, hand)
    view = PlanView(problem, plan, hand_layout(problem, hand, plan.place))
    priced = priced_plan(problem, args.score, hand, plan)
    try:
        best = search(problem)[0]
    except PlanError:  # the search has no plan (the scored one has a degree outside --degrees, say)
        best = None
    if args.json:
        body = {**plan_json(view, None, acceptance), "period_us": plan.period_us}
        body |= {"per_token_us": plan.per_token_us, "tokens_per_s": plan.tokens_per_s, "plan": priced.to_json()}
        print(json.dumps(body, indent=1))
    else:
        sys.stdout.write(score_page(view, best))
    if args.svg:
        from flexspec.compiler.pages.draw_plan import plan_svg

        _write(args.svg, plan_svg(view), "picture")
    _save(args, priced)
    return 0


def _save(args: argparse.Namespace, plan: Plan) -> None:
    if args.output:
        _write(args.output, json.dumps(plan.to_json(), indent=1, sort_keys=True) + "\n", "plan")


def _write(path: Path, text: str, what: str) -> None:
    write_file(path, text)
    print(f"{what} written to {path}", file=sys.stderr)

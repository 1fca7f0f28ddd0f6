"""Options that ``serve`` and ``generate`` share: how an artifact is run. Also the help on draft plans."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexspec.runtime.open.serve_options import ServeOptions


_METHODS = """\
draft plans (--draft): which of the tokens that the sources propose are verified
  auto              the plan stored in the artifact (default of serve and generate)
  off               none: plain decoding, one token per step
  chain:DEPTH       the best path, DEPTH tokens long
  tree:K1,K2,...    static trees of the SSMs: each node of level i gets Ki children
  budget:NODES      the nodes of all sources that are worth their cost, at most NODES
options follow, each after a slash, as in budget:24/depth=8/sources=suffix+ssm:
  nodes=N, depth=N  maximum nodes and depth of the tree
  sampled=deterministic    or mixed: sampled requests draw one child per node from the SSM (tree of one SSM)
  sources=A+B       from these, shown with their options:
"""


def draft_plans_help() -> str:
    """The help on draft plans; sources and their options come from the drafter records."""
    from flexspec.drafters.record import drafter_records

    lines = []
    for record in drafter_records():
        name = ", ".join([*record.sources(2), "..."]) if record.runs_ssms else record.name
        lines.append(f"    {name:18}{record.help}{' (only if named)' if record.order is None else ''}")
        lines += [
            f"    {'':4}{option.name + '=N':14}{option.help}; 1 to {option.highest}, default {option.default}"
            for option in record.options
        ]
    return _METHODS + "".join(f"{line}\n" for line in lines)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    from flexspec.runtime.backends.registry import DEFAULT_BACKEND, backends

    known = backends()
    notes = [f"; {name}: {backend.help}" for name, backend in known.items() if backend.help]
    parser.add_argument(
        "--draft",
        default="auto",
        metavar="PLAN",
        help="auto, off, chain:DEPTH, tree:K1,K2,... or budget:NODES, with options; see below (default auto)",
    )
    parser.add_argument(
        "--device",
        choices=tuple(known),
        default=DEFAULT_BACKEND,
        help=f"where models run (default {DEFAULT_BACKEND}){''.join(notes)}",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: one per core, at most 8)")
    parser.add_argument(
        "--kv-tokens", type=int, default=16_384, help="capacity of the KV pool, in tokens (default 16384)"
    )
    parser.add_argument(
        "--max-requests", type=int, default=16, help="maximum number of concurrent requests (default 16)"
    )
    parser.add_argument(
        "--context", type=int, default=0, help="maximum tokens of prompt plus output (default: the model's maximum)"
    )
    parser.add_argument("--no-checks", action="store_true", help="skip the digest checks and the self-test at startup")


_FLAGS = {
    "threads": "--threads",
    "kv_tokens": "--kv-tokens",
    "max_requests": "--max-requests",
    "context_tokens": "--context",
}


def serve_options(args: argparse.Namespace) -> ServeOptions:
    """The options, after setting the environment that the device needs. Raises CapacityError for impossible numbers."""
    from flexspec.runtime.open.serve_options import ServeOptions, prepare

    options = ServeOptions(
        draft=args.draft,
        device=args.device,
        threads=args.threads,
        kv_tokens=args.kv_tokens,
        max_requests=args.max_requests,
        context_tokens=args.context,
        checks=not args.no_checks,
    )
    return prepare(options, _FLAGS)

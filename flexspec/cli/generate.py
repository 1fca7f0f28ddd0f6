"""``flexspec generate X.fspec -p TEXT``: one completion in the terminal, and its speculation statistics."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EPILOG = """\
example:
  flexspec generate build/smollm2.fspec -p "Why is the sky blue?" --max-tokens 100
(`make demo` puts the artifact there)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from flexspec.cli.options.sampling import add_sampling_arguments
    from flexspec.cli.running import add_run_arguments, draft_plans_help

    parser.epilog = f"{draft_plans_help()}\n{EPILOG}"
    parser.add_argument("artifact", type=Path, help="an artifact made by flexspec compile")
    parser.add_argument("-p", "--prompt", required=True, help="the prompt, answered as a chat message")
    parser.add_argument("--raw", action="store_true", help="continue the prompt instead of using the chat template")
    add_sampling_arguments(parser)
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from flexspec.cli.options.sampling import sampling_params
    from flexspec.cli.running import serve_options
    from flexspec.runtime.engine.api import RequestStats
    from flexspec.runtime.open.engine import open_engine

    params = sampling_params(args)
    served = open_engine(args.artifact, serve_options(args))
    stats, reason = RequestStats(), None
    try:
        for delta in served.stream(args.prompt if args.raw else served.question(args.prompt), params):
            print(delta.text, end="", flush=True)
            stats, reason = delta.stats, delta.finish_reason
    finally:
        served.close()
    print()
    print(
        f"[{stats.completion_tokens} tokens, {stats.tokens_per_s:.1f} tokens/s, "
        f"{stats.tokens_per_round:.2f} tokens a round, draft {served.draft}, finished: {reason}]",
        file=sys.stderr,
    )
    return 0

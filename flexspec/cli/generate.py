"""``flexspec generate X.fspec -p TEXT``: one completion in the terminal, with what speculation did."""

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
    from flexspec.cli.running import DRAFT_PLANS, add_run_arguments

    parser.epilog = f"{DRAFT_PLANS}\n{EPILOG}"
    parser.add_argument("artifact", type=Path, help="an artifact made by flexspec compile")
    parser.add_argument("-p", "--prompt", required=True, help="the text to answer")
    parser.add_argument("--raw", action="store_true", help="continue the text instead of using the chat template")
    parser.add_argument("--max-tokens", type=int, default=128, help="most new tokens (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this mass (default 1: all)"
    )
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens (default 0: all)")
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="drop tokens below this share of the likeliest (default 0)"
    )
    parser.add_argument("--seed", type=int, default=None, help="seed of sampling (default: a fresh one)")
    parser.add_argument("--stop", action="append", default=[], help="a stop string; may be repeated")
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from flexspec.cli.running import serve_options
    from flexspec.runtime.engine.api import RequestStats
    from flexspec.runtime.open.engine import open_engine
    from flexspec.sampling import SamplingParams

    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
    )
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

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
    from flexspec.errors import EngineError
    from flexspec.runtime.engine.api import Delta
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
    last: list[Delta] = []

    def show(delta: Delta) -> None:
        print(delta.text, end="", flush=True)
        last[:] = [delta]

    try:
        text = args.prompt
        if served.chat is not None and not args.raw:
            text = served.chat.render([{"role": "user", "content": args.prompt}])
        served.engine.submit(served.tokenizer.encode(text, add_special=True), params, show)
        while served.engine.step():
            pass
    finally:
        served.close()
    print()
    final = last[0]
    if final.error:
        raise EngineError(final.error, "a finished answer", "see the message")
    stats = final.stats
    rate = stats.completion_tokens / stats.decode_s if stats.decode_s else 0.0
    per_round = (stats.completion_tokens - 1) / stats.rounds if stats.rounds else 0.0
    print(
        f"[{stats.completion_tokens} tokens, {rate:.1f} tokens/s, {per_round:.2f} tokens a round, "
        f"draft {served.draft}, finished: {final.finish_reason}]",
        file=sys.stderr,
    )
    return 0

"""The cost of running an artifact's plan on several ranks: tokens per second against one rank, and where time goes.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/ranks.py X.fspec

X.fspec comes from ``flexspec compile --plan``. Each rank has one thread; texts must be equal. Rank 0 prints.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from flexspec.runtime.distributed.executor import DistributedExecutor
from flexspec.runtime.distributed.processes import this_rank
from flexspec.runtime.open.engine import OpenLlm, open_engine
from flexspec.runtime.open.opening import Opening
from flexspec.runtime.open.ranks import open_leader, run_follower
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.runtime.open.served import Served
from flexspec.sampling import SamplingParams

PROMPTS = (
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "Explain how a bicycle stays upright.",
    "List five uses of a paper clip.",
    "What is the capital of Australia, and why not Sydney?",
    "Tell a story about a lighthouse keeper.",
    "How do I boil an egg?",
    "Summarise the plot of Hamlet in four sentences.",
)
OPTIONS = ServeOptions(threads=1, kv_tokens=8192, checks=False)


def run(served: Served, tokens: int, together: int) -> tuple[int, float, list[str]]:
    """Tokens, seconds of rounds and texts of the prompts, ``together`` at a time; the first ones also warm up."""
    generated, seconds, texts = 0, 0.0, []
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    waves = [PROMPTS[i : i + together] for i in range(0, len(PROMPTS), together)]
    for number, wave in enumerate((waves[0], *waves)):
        began = time.perf_counter()
        answers = served.generate([served.question(prompt) for prompt in wave], params)
        if number:
            seconds += time.perf_counter() - began
            generated += sum(len(answer.token_ids) for answer in answers)
            texts += [answer.text for answer in answers]
    return generated, seconds, texts


def measure(path: Path, draft: str, tokens: int, together: int, open_llm: OpenLlm | None) -> tuple[float, list[str]]:
    served = open_engine(path, replace(OPTIONS, draft=draft), None, open_llm)
    generated, seconds, texts = run(served, tokens, together)
    if open_llm is None:
        served.close()
    return generated / seconds, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer, past its end if need be (default 96)")
    parser.add_argument("--together", type=int, default=1, help="requests at the same time (default 1)")
    parser.add_argument(
        "--draft", default="auto", help="draft plan (default: the artifact's); not one that needs ranks"
    )
    args = parser.parse_args()
    options = replace(OPTIONS, draft=args.draft)
    if this_rank().rank:
        run_follower(args.artifact, options)
        return
    base, wanted = measure(args.artifact, args.draft, args.tokens, args.together, None)
    executors: list[DistributedExecutor] = []

    def open_once(opening: Opening) -> DistributedExecutor:
        executors.append(open_leader(opening))
        return executors[0]

    rate, texts = measure(args.artifact, args.draft, args.tokens, args.together, open_once)
    spent = executors[0].spent
    per = [1e3 * s / spent.steps for s in (spent.broadcast_s, spent.shard_s, spent.wait_s)]
    print(
        f"draft {args.draft}, {args.together} together: one rank {base:.1f} tokens/s, ranks {rate:.1f}, ratio "
        f"{rate / base:.3f}; a step of rank 0: broadcast {per[0]:.2f} ms, shard, exchanges {per[1]:.2f} ms, wait for "
        f"results {per[2]:.2f} ms; texts {'equal' if texts == wanted else 'differ'}",
        flush=True,
    )
    executors[0].close()
    sys.exit(0 if texts == wanted else 1)


if __name__ == "__main__":
    main()

"""What it costs to run an artifact's plan of several ranks: tokens per second against one rank, and where time goes.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/ranks.py X.fspec

X.fspec is one of ``flexspec compile --plan``. All run with one thread a rank; texts must be equal. Rank 0 prints.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from flexspec.runtime.distributed_executor import DistributedExecutor, Spent
from flexspec.runtime.distributed_open import open_leader, run_follower
from flexspec.runtime.open_engine import OpenLlm, Served, ServeOptions, open_engine
from flexspec.sampling import SamplingParams

PROMPTS = ("Why is the sky blue?", "Write a short poem about the sea.", "Explain how a bicycle stays upright.")


def run(served: Served, tokens: int) -> tuple[int, float, list[str]]:
    """Tokens, seconds of rounds and texts of the prompts, one after another; the first one also warms up."""
    made, seconds, texts = 0, 0.0, []
    for number, prompt in enumerate((PROMPTS[0], *PROMPTS)):
        parts: list[str] = []
        count = [0]

        def hear(text: str, new: int, parts: list[str] = parts, count: list[int] = count) -> None:
            parts.append(text)
            count[0] += new

        text = served.chat.render([{"role": "user", "content": prompt}]) if served.chat else prompt
        ids = served.tokenizer.encode(text, add_special=not served.chat)
        began = time.perf_counter()
        served.engine.submit(ids, SamplingParams(max_tokens=tokens), lambda d: hear(d.text, len(d.token_ids)))
        while served.engine.step():
            pass
        if number:
            made, seconds = made + count[0], seconds + time.perf_counter() - began
            texts.append("".join(parts))
    return made, seconds, texts


def measure(path: Path, draft: str, tokens: int, open_llm: OpenLlm | None) -> tuple[float, list[str]]:
    served = open_engine(path, ServeOptions(draft=draft, threads=1, kv_tokens=4096, checks=False), None, open_llm)
    made, seconds, texts = run(served, tokens)
    if open_llm is None:
        served.close()
    return made / seconds, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    options = ServeOptions(threads=1, kv_tokens=4096, checks=False)
    if os.environ["RANK"] != "0":
        run_follower(args.artifact, options)
        return
    drafts = ("off", "auto")
    alone = {draft: measure(args.artifact, draft, args.tokens, None) for draft in drafts}
    kept: list[DistributedExecutor] = []

    def open_once(*given: object) -> DistributedExecutor:
        if not kept:
            kept.append(open_leader(*given))  # type: ignore[arg-type]
        kept[0].spent = Spent()
        return kept[0]

    equal = True
    for draft in drafts:
        rate, texts = measure(args.artifact, draft, args.tokens, open_once)
        spent, (base, wanted) = kept[0].spent, alone[draft]
        equal &= texts == wanted
        per = [1e3 * s / spent.steps for s in (spent.tell_s, spent.shard_s, spent.wait_s)]
        print(
            f"draft {draft}: one rank {base:.1f} tokens/s, ranks {rate:.1f}, ratio {rate / base:.3f}; a step of "
            f"rank 0: tell {per[0]:.2f} ms, shard and exchanges {per[1]:.2f} ms, wait for results {per[2]:.2f} ms; "
            f"texts {'equal' if texts == wanted else 'differ'}",
            flush=True,
        )
    kept[0].close()
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()

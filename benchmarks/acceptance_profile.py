"""Measures an acceptance profile for `flexspec plan`: tokens committed a round with each draft plan of an artifact.

Every prompt is answered alone, greedy, and rounds are counted as the engine reports them; times play no part, so that a
disturbed machine gives the same profile. Run:

    python benchmarks/acceptance_profile.py build/smollm2.fspec --ssm-name smollm2-135m -o profile.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import answer  # noqa: E402
from flexspec.compiler.acceptance_profile import FORMAT, read_acceptance  # noqa: E402
from flexspec.runtime.api import RequestStats  # noqa: E402
from flexspec.runtime.drafters.plan import DraftPlan  # noqa: E402
from flexspec.runtime.open_engine import ServeOptions, open_engine  # noqa: E402
from flexspec.sampling import SamplingParams  # noqa: E402

PLANS = (
    "chain:1/sources=ssm",
    "chain:2/sources=ssm",
    "chain:4/sources=ssm",
    "tree:2,1/sources=ssm",
    "tree:4,2/sources=ssm",
    "tree:3,2,1/sources=ssm",
    "tree:4,2,2,1/sources=ssm",
)


class RoundCounter:
    """Sums what the engine reports of its rounds: how many, tokens committed, nodes verified at each depth."""

    def __init__(self) -> None:
        self.rounds = self.committed = 0
        self.levels: list[int] = []

    def record_round(self, source: str, drafted: Sequence[int], accepted: Sequence[int], committed: int) -> None:
        del source, accepted
        self.rounds += committed > 0  # a round is told once a source, its tokens with the first
        self.committed += committed
        self.levels += [0] * (len(drafted) - len(self.levels))
        for depth, count in enumerate(drafted):
            self.levels[depth] += count

    def record_step(self, seconds: float, kind: str) -> None: ...

    def record_finished(self, reason: str, stats: RequestStats, first_token_s: float | None) -> None: ...

    def set_pages(self, free: int, total: int) -> None: ...

    def set_load(self, running: int, queued: int) -> None: ...


def measure_plan(artifact: Path, draft: str, prompts: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """An entry of the profile."""
    counter = RoundCounter()
    served = open_engine(artifact, ServeOptions(draft=str(DraftPlan.parse(draft)), measure=False), counter)
    try:
        for prompt in prompts:
            answer(served, prompt, SamplingParams(max_tokens=max_tokens))
    finally:
        served.close()
    return {
        "draft": draft,
        "levels": [round(count / counter.rounds, 3) for count in counter.levels if count],
        "committed_tokens": round(counter.committed / counter.rounds, 3),
        "rounds": counter.rounds,
    }


def read_prompts(path: Path, count: int) -> list[str]:
    """First turns, spread evenly over the file, whose categories stand together."""
    rows = [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [rows[i * len(rows) // count] for i in range(min(count, len(rows)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--llm-name", default="smollm2-135m-instruct")
    parser.add_argument("--ssm-name", action="append", default=[], help="as `flexspec plan` names it: folder or file")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).with_name("prompts.jsonl"))
    parser.add_argument("--count", type=int, default=13)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts, args.count)
    entries = []
    for draft in PLANS:
        entries.append(measure_plan(args.artifact, draft, prompts, args.max_tokens))
        print(json.dumps(entries[-1]), flush=True)
    today = datetime.date.today().isoformat()
    body = {
        "format": FORMAT,
        "llm": args.llm_name,
        "ssms": args.ssm_name,
        "origin": f"measured {today} by benchmarks/acceptance_profile.py, one request at a time",
        "date": today,
        "prompts": f"{len(prompts)} of {args.prompts.name}, first turns, {args.max_tokens} new tokens",
        "sampling": "greedy",
        "entries": entries,
    }
    read_acceptance(body, args.output.stem)
    args.output.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

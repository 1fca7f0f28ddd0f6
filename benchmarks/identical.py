"""Does speculation change any token? Every prompt off, then under each draft plan. Writes build/bench/identical.json.

    python benchmarks/identical.py --count 64 --max-tokens 128
    python benchmarks/identical.py --dtype f32 --draft chain:4/sources=suffix --prompts spec_bench.jsonl

Off answers one prompt at a time. With drafts ``--together`` requests run at once and prompts enter while others decode
(continuous batching): equal tokens then also show that no row depends on its neighbours. Trees get all the nodes of
their plan, whatever the cost, so tokens per round say nothing about speed. Exit code 1 if a token differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.fetch_model import fetch_model  # noqa: E402
from benchmarks.measure import answer, answer_all, pooled_tokens_per_round  # noqa: E402
from examples.demo import compiled  # noqa: E402
from flexspec.draft_plan import DraftPlan  # noqa: E402
from flexspec.errors import FlexspecError  # noqa: E402
from flexspec.runtime.engine.complete import Completion  # noqa: E402
from flexspec.runtime.open.engine import open_engine  # noqa: E402
from flexspec.runtime.open.serve_options import ServeOptions  # noqa: E402
from flexspec.sampling import SamplingParams  # noqa: E402

BUILD = ROOT / "build"
SSM = ROOT / "ssm" / "smollm2-135m"
STATIC = "tree:1,1,3,1,1,1,1,1"  # the shape of SpecInfer's evaluation
NODES = 24
QUEUE = 16  # prompts submitted at a time


@dataclass(frozen=True, slots=True)
class Outcome:
    """One plan against off."""

    plan: str
    prompts: int
    tokens: int
    differing: int  # tokens that differ at their place, or that only one of the texts has
    differing_prompts: tuple[int, ...]
    tokens_per_round: float
    drafted: int
    accepted: int
    switched_off: int  # how often the engine turned speculation off; text after that proves nothing
    seconds: float

    def row(self) -> str:
        return f"{self.plan:58}{self.prompts:8}{self.tokens:8}{self.differing:11}{self.tokens_per_round:14.3f}"


HEADER = f"{'plan':58}{'prompts':>8}{'tokens':>8}{'differing':>11}{'tokens/round':>14}"


def compiled_for(dtype: str) -> Path:
    """The demo's artifact, or the same in float32."""
    model = fetch_model(BUILD / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    if dtype == "bf16":
        return compiled(model, SSM, BUILD / "smollm2.fspec")
    return compiled(model, SSM, BUILD / f"smollm2-{dtype}.fspec", "--dtype", dtype)


def sources_of(artifact: Path) -> list[str]:
    """Names of the artifact's draft sources."""
    models = json.loads((artifact / "model.json").read_text())["models"]
    table = ["ngram"] if (artifact / "ngram.safetensors").exists() else []
    return ["suffix", *table, *(model["name"] for model in models[1:])]


def default_plans(sources: Sequence[str]) -> list[str]:
    """Chain, budget and suffix alone; with an SSM also its static tree, alone and merged with every other source."""
    plans = ["chain:4", f"budget:{NODES}", f"budget:{NODES}/sources=suffix"]
    if any(source.startswith("ssm") for source in sources):
        plans += [STATIC, f"{STATIC}/nodes={NODES}/sources={'+'.join(sources)}"]
    return plans


def read_prompts(path: Path, count: int) -> list[str]:
    """The first turns of ``count`` prompts, spread evenly over the file so that every category has its share."""
    texts = [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    count = min(count, len(texts))
    return [texts[i * len(texts) // count] for i in range(count)]


def run_off(artifact: Path, prompts: Sequence[str], params: SamplingParams, options: ServeOptions) -> list[Completion]:
    """Each prompt alone, without speculation."""
    served = open_engine(artifact, replace(options, draft="off", checks=True))
    try:
        answers = []
        for i, prompt in enumerate(prompts):
            answers.append(answer(served, prompt, params))
            note(f"off: prompt {i + 1} of {len(prompts)}", last=i + 1 == len(prompts))
        return answers
    finally:
        served.close()


def run_plan(
    artifact: Path, prompts: Sequence[str], params: SamplingParams, options: ServeOptions, off: Sequence[Completion]
) -> Outcome:
    """All prompts through one engine with ``options.draft``, compared with ``off``."""
    served = open_engine(artifact, options)
    began = time.monotonic()
    try:
        on = []
        for start in range(0, len(prompts), QUEUE):
            on += answer_all(served, prompts[start : start + QUEUE], params)
            note(f"{options.draft}: prompt {len(on)} of {len(prompts)}", last=len(on) == len(prompts))
    finally:
        served.close()
    differing = [differing_tokens(a.token_ids, b.token_ids) for a, b in zip(off, on, strict=True)]
    return Outcome(
        plan=str(served.draft),
        prompts=len(prompts),
        tokens=sum(len(a.token_ids) for a in on),
        differing=sum(differing),
        differing_prompts=tuple(i for i, count in enumerate(differing) if count),
        tokens_per_round=round(pooled_tokens_per_round(on), 4),
        drafted=sum(a.stats.drafted for a in on),
        accepted=sum(a.stats.accepted for a in on),
        switched_off=served.engine.speculation.switched_off,
        seconds=round(time.monotonic() - began, 1),
    )


def differing_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Places where two texts differ, and how much longer one of them is."""
    return sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))


def note(text: str, *, last: bool = False) -> None:
    print(f"\r{text}", end="\n" if last else "", file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=ROOT / "benchmarks" / "prompts.jsonl")
    parser.add_argument("--count", type=int, default=64, help="prompts taken, evenly over the file (default 64)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument(
        "--draft", action="append", default=[], help="a draft plan; repeat for several (default: all kinds)"
    )
    parser.add_argument("--together", type=int, default=4, help="requests at once with drafts (default 4)")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--out", type=Path, default=BUILD / "bench" / "identical.json")
    args = parser.parse_args()
    try:
        for plan in args.draft:
            DraftPlan.parse(plan)
    except FlexspecError as error:
        parser.error(str(error))
    if min(args.count, args.max_tokens, args.together) < 1:
        parser.error("--count, --max-tokens and --together are at least 1")
    return args


def main() -> int:
    args = parse_arguments()
    artifact = compiled_for(args.dtype)
    prompts = read_prompts(args.prompts, args.count)
    plans = args.draft or default_plans(sources_of(artifact))
    params = SamplingParams(max_tokens=args.max_tokens)
    # Not measured: without step costs a budget takes all its nodes, which is what this tests.
    options = ServeOptions(threads=args.threads, max_requests=args.together, measure=False, checks=False)
    off = run_off(artifact, prompts, params, options)
    print(HEADER, flush=True)
    outcomes = []
    for plan in plans:
        outcomes.append(run_plan(artifact, prompts, params, replace(options, draft=plan), off))
        print(outcomes[-1].row(), flush=True)
    same = not any(outcome.differing for outcome in outcomes)
    report = {
        "dtype": args.dtype,
        "prompts": args.prompts.name,
        "max_new_tokens": args.max_tokens,
        "together": args.together,
        "off_tokens": sum(len(a.token_ids) for a in off),
        "identical": same,
        "plans": [asdict(outcome) for outcome in outcomes],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    print(f"{'every token is the same' if same else 'TOKENS DIFFER'}; written to {args.out}")
    return 0 if same else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

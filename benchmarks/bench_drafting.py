"""Time of a round's drafting in Python, part by part, on one core; no model is run.

    python benchmarks/bench_drafting.py [--rounds 2000] [--json]

Text is the Python language reference that ships with the interpreter (pydoc_data.topics), cut into word pieces. The
SSM's executor is a stand-in that returns fixed logits at once, so its lines are only the host side of an SSM round:
packing, top-k, bookkeeping. The last lines are whole rounds. Times are CPU time of the process, so a busy machine
matters less.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from time import process_time

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact.ngram_table import build_table, load_table, save_table
from flexspec.draft_plan import DraftLadder, DraftPlan
from flexspec.runtime.drafters.base import Drafter, DraftRequest
from flexspec.runtime.drafters.budget import StepCost
from flexspec.runtime.drafters.ngram import NgramDrafter, NgramModel
from flexspec.runtime.drafters.planned import PlannedDrafter
from flexspec.runtime.drafters.ssm import SsmDrafter
from flexspec.runtime.drafters.suffix import SuffixAutomaton, SuffixDrafter
from flexspec.runtime.executors.step import StepBatch, StepResult
from flexspec.runtime.executors.top_successors import top_successors
from flexspec.sampling import SamplingParams

OUTPUTS = 8_192  # the reduced vocabulary of the shipped SSM
STEP_COST = StepCost.from_points([(1, 1.0), (8, 1.02), (16, 1.04), (32, 1.19), (512, 12.0)])
GREEDY = SamplingParams()


def word_pieces() -> list[int]:
    """The reference text as token ids: pieces of up to six letters, numbered by first appearance."""
    ids: dict[str, int] = {}
    text = "\n".join(topics[name] for name in sorted(topics))
    return [ids.setdefault(piece, len(ids)) for piece in re.findall(r" ?\w{1,6}|\W", text)]


class InstantExecutor:
    """Answers every step at once from a fixed block of logits."""

    vocab_size = OUTPUTS
    max_rows = 256
    pages = 4_096
    max_positions = 1 << 20

    def __init__(self) -> None:
        self._logits = np.random.default_rng(0).normal(0.0, 3.0, (self.max_rows, OUTPUTS)).astype(np.float32)

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        return StepResult(np.zeros(0, np.int32), self._logits[: len(batch.logit_rows_L)], None)

    def top_successors(self, logits_LV: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return top_successors(logits_LV, k)

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        """Nothing is stored."""

    def close(self) -> None:
        """Nothing is held."""


def quantiles_us(seconds: list[float]) -> dict[str, float]:
    return {
        "median_us": round(float(np.median(seconds)) * 1e6, 1),
        "p95_us": round(float(np.quantile(seconds, 0.95)) * 1e6, 1),
    }


def time_calls(call: Callable[[], object], repeats: int) -> dict[str, float]:
    seconds = []
    for _ in range(repeats):
        start = process_time()
        call()
        seconds.append(process_time() - start)
    return quantiles_us(seconds)


def time_rounds(drafter: Drafter, texts: list[list[int]], nodes: int, rounds: int) -> dict[str, float]:
    """Each round commits two tokens per request, then proposes: the time of both together, and the mean tree size."""
    prompt = 400
    for request, text in enumerate(texts):
        drafter.begin(request, text[:prompt])
    seconds, drafted = [], 0
    for position in range(prompt, min(prompt + 2 * rounds, len(texts[0])) - 1, 2):
        ask = [DraftRequest(request, text[position + 1], nodes, 8, GREEDY) for request, text in enumerate(texts)]
        start = process_time()
        for request, text in enumerate(texts):
            drafter.observe(request, text[position : position + 2], None)
        trees = drafter.propose(ask)
        if isinstance(drafter, PlannedDrafter):
            for tree in trees:
                drafter.record(tree, [0, 1] if len(tree) > 1 else [0])
        seconds.append(process_time() - start)
        drafted += sum(len(tree) - 1 for tree in trees)
    for request in range(len(texts)):
        drafter.end(request)
    return quantiles_us(seconds) | {"nodes": round(drafted / len(seconds) / len(texts), 1)}


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """All lines of the report, by name."""
    tokens = word_pieces()
    held_out, corpus = tokens[: len(tokens) // 8], tokens[len(tokens) // 8 :]
    pieces = [(corpus[i : i + 20], corpus[i + 20 : i + 200]) for i in range(0, len(corpus), 200)]
    report: dict[str, dict[str, float]] = {}
    for size in (512, 4_096, 16_384):
        report[f"suffix: index {size} tokens"] = time_calls(lambda size=size: SuffixAutomaton(corpus[:size]), 7)  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ngram.safetensors"
        start = process_time()
        save_table(build_table(pieces, 4), path)
        report["n-gram: build"] = {"seconds": round(process_time() - start, 2), "bytes": path.stat().st_size}
        report["n-gram: load"] = time_calls(lambda: NgramModel(load_table(path)), 7)
        model = NgramModel(load_table(path))
        report["suffix: round, 32 nodes"] = time_rounds(SuffixDrafter(), [held_out], 32, rounds)
        for nodes in (8, 16, 32):
            report[f"n-gram: round, {nodes} nodes, empty cache"] = time_rounds(
                NgramDrafter(NgramModel(load_table(path))), [held_out], nodes, rounds
            )
        for text in ("budget:16/ssm_depth=2/sources=ssm", "chain:4/sources=ssm", "tree:1,1,3,1/sources=ssm"):
            report[f"ssm host side: {text}"] = time_rounds(_planned(text, model), [held_out], 16, rounds // 4)
        for text in ("chain:8", "budget:8", "budget:16", "budget:32", "budget:16/ssm_depth=2/sources=suffix+ngram+ssm"):
            report[f"whole round: {text}"] = time_rounds(_planned(text, model), [held_out], 32, rounds)
        step = len(held_out) // 16
        texts = [held_out[i * step :] + held_out[: i * step] for i in range(16)]
        report["whole round, 16 requests: budget:16"] = time_rounds(
            _planned("budget:16", model), texts, 16, rounds // 8
        )
    return report


def _planned(text: str, model: NgramModel) -> PlannedDrafter:
    plan = DraftPlan.parse(text)
    ssm = SsmDrafter(InstantExecutor(), plan.expansion, 1 << 16, keep_ids=np.arange(OUTPUTS))
    return PlannedDrafter(DraftLadder.of(plan), [SuffixDrafter(), NgramDrafter(model), ssm], STEP_COST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2_000, help="rounds timed for each line (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    report = measure(options.rounds)
    if options.json:
        print(json.dumps(report, indent=1))
        return
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    for name, values in report.items():
        print(f"{name:62}" + "  ".join(f"{key} {value:>9,}" for key, value in values.items()))


if __name__ == "__main__":
    main()

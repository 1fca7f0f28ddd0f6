"""Tokens per second on this CPU, speculation off and on, next to the peers, in one run. Writes build/bench/cpu.json.

    python benchmarks/cpu.py --threads 1                         built-in prompts, 13 categories
    python benchmarks/cpu.py --prompts spec_bench.jsonl          prompts in Spec-Bench's JSONL form
    python benchmarks/cpu.py --quick                             seconds instead of minutes; rough figures

Each prompt is answered off, then on; medians are over prompts. Rates are decode rates of one greedy request.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.fetch_model import fetch_model  # noqa: E402
from benchmarks.measure import (  # noqa: E402
    Comparison,
    answer,
    answer_all,
    compare,
    pooled_rate,
    pooled_tokens_per_round,
)
from benchmarks.moments import Bandwidth, bracket  # noqa: E402
from examples.demo import Server, compiled  # noqa: E402
from flexspec.host.cores import usable_cores  # noqa: E402
from flexspec.runtime.executors.pages import RowGroup, pack_rows  # noqa: E402
from flexspec.runtime.executors.step import Executor  # noqa: E402
from flexspec.runtime.open.engine import open_engine  # noqa: E402
from flexspec.runtime.open.serve_options import ServeOptions  # noqa: E402
from flexspec.sampling import SamplingParams  # noqa: E402
from flexspec.types import PAGE_TOKENS  # noqa: E402

BUILD = ROOT / "build" / "bench"
TREE_SIZES = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Prompt:
    category: str
    text: str
    line: str  # of the file, for the peers


def read_prompts(path: Path, per_category: int) -> list[Prompt]:
    """The first turn of the first ``per_category`` prompts of each category, categories in turn."""
    by_category: dict[str, list[Prompt]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        group = by_category.setdefault(record["category"], [])
        if len(group) < per_category:
            group.append(Prompt(record["category"], record["turns"][0], line))
    groups = list(by_category.values())
    return [group[i] for i in range(per_category) for group in groups if i < len(group)]


def verify_over_decode(executor: Executor, context: int, repeats: int) -> dict[str, float]:
    """Median time of a verify of n nodes over that of a one-token step, random trees after ``context`` tokens."""
    rng = np.random.default_rng(0)
    pages = list(range(-(-(context + 65) // PAGE_TOKENS)))
    ids = rng.integers(0, executor.vocab_size, context).tolist()
    for start in range(0, context, executor.max_rows):
        chunk = ids[start : start + executor.max_rows]
        executor.step(
            pack_rows([RowGroup(chunk, range(start, start + len(chunk)), start, pages, [])]), want_logits=False
        )
    batches = {1: pack_rows([RowGroup([5], [context], context, pages, [0])])}
    for n in TREE_SIZES:
        bits, depth = [1], [0]
        for i in range(1, n):
            parent = int(rng.integers(max(0, i - 6), i))
            bits.append(bits[parent] | 1 << i)
            depth.append(depth[parent] + 1)
        tokens = rng.integers(0, executor.vocab_size, n).tolist()
        group = RowGroup(tokens, [context + d for d in depth], context, pages, range(n), bits)
        batches[n] = pack_rows([group])
    times: dict[int, list[float]] = {n: [] for n in batches}
    for _ in range(repeats):
        for n, batch in batches.items():
            began = time.perf_counter()
            executor.step(batch, want_logits=False, want_features=True)
            times[n].append(time.perf_counter() - began)
    one = statistics.median(times[1])
    return {str(n): round(statistics.median(times[n]) / one, 3) for n in TREE_SIZES}


def measure_verify(artifact: Path, threads: Sequence[int], repeats: int) -> dict[str, dict[str, float]]:
    """verify_over_decode by thread count."""
    ratios = {}
    for count in threads:
        served = open_engine(artifact, ServeOptions(draft="off", threads=count, checks=False))
        ratios[str(count)] = verify_over_decode(served.engine.executor, 400, repeats)
        served.close()
    return ratios


def batch_rate(artifact: Path, prompts: Sequence[Prompt], threads: int, max_tokens: int) -> float:
    """New tokens per second, all requests together and prefill included, 16 at once without speculation."""
    served = open_engine(artifact, ServeOptions(draft="off", threads=threads, checks=False))
    try:
        began = time.perf_counter()
        answers = answer_all(served, [p.text for p in prompts], SamplingParams(max_tokens=max_tokens))
        return sum(len(a.token_ids) for a in answers) / (time.perf_counter() - began)
    finally:
        served.close()


def cold_start(artifact: Path) -> dict[str, float]:
    """Seconds from ``flexspec serve`` to a healthy server, and its peak memory after one answer."""
    from examples.demo import chat

    began = time.perf_counter()
    with Server(artifact, 0) as server:
        seconds = time.perf_counter() - began
        sys.stdout.flush()
        with open(os.devnull, "w") as quiet:
            shown, sys.stdout = sys.stdout, quiet
            try:
                chat(server.url, "Say hello.", 32)
            finally:
                sys.stdout = shown
        peak = server.peak_memory_bytes()
    return {"seconds": round(seconds, 2), "peak_memory_mb": round(peak / 1e6)}


def run_peer(name: str, prompts: Sequence[Prompt], threads: int, max_tokens: int, batch: int) -> dict[str, Any]:
    """One peer on our prompts and threads, through benchmarks/peers; if it is absent, the entry says why."""
    file, out = BUILD / f"peer_prompts_{batch}.jsonl", BUILD / f"peer_{name}_{batch}.json"
    file.write_text("".join(prompt.line + "\n" for prompt in prompts), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.peers.run", name, "--prompts", str(file), "--threads", str(threads)]
    command += ["--max-new-tokens", str(max_tokens), "--batch", str(batch), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode:
        return {"absent": f"benchmarks/peers failed with {done.returncode}"}
    entry: dict[str, Any] = json.loads(out.read_text())["peers"][name]
    entry.pop("output_ids", None)
    return entry


def off_rate(artifact: Path, prompts: Sequence[Prompt], threads: int, max_tokens: int) -> float:
    """Decode rate of one request at a time, speculation off."""
    served = open_engine(artifact, ServeOptions(draft="off", threads=threads, checks=False))
    try:
        params = SamplingParams(max_tokens=max_tokens)
        return pooled_rate([answer(served, p.text, params) for p in prompts])
    finally:
        served.close()


def measure_peers(artifact: Path, prompts: Sequence[Prompt], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Each peer between two runs of ours: one request at a time, and sixteen at once on all processors."""
    few = prompts[: args.peer_prompts]
    sixteen = [prompts[i % len(prompts)] for i in range(16)]
    cores = usable_cores()
    single = {
        name: bracket(
            lambda: off_rate(artifact, few, args.threads, args.max_tokens),
            partial(run_peer, name, few, args.threads, args.max_tokens, 1),
            "decode_tokens_per_s",
        )
        for name in args.peers
    }
    batched = {
        name: bracket(
            lambda: batch_rate(artifact, sixteen, cores, args.max_tokens),
            partial(run_peer, name, sixteen, cores, args.max_tokens, 16),
            "tokens_per_s",
        )
        for name in args.batch_peers
    }
    return {"peers": single, "batch_16_peers": batched}


def by_category(prompts: Sequence[Prompt], result: Comparison) -> dict[str, dict[str, float]]:
    ratios: dict[str, dict[str, float]] = {}
    for category in dict.fromkeys(p.category for p in prompts):
        pairs = [pair for p, pair in zip(prompts, result.pairs, strict=True) if p.category == category]
        ratios[category] = {
            "tree_over_off": round(statistics.median(pair.ratio for pair in pairs), 3),
            "tree_over_off_with_prefill": round(statistics.median(pair.total_ratio for pair in pairs), 3),
            "tokens_per_round": round(pooled_tokens_per_round([pair.on for pair in pairs]), 3),
            "tree_tokens_per_s": round(pooled_rate([pair.on for pair in pairs]), 1),
        }
    return ratios


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "processors": usable_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load_average": os.getloadavg()[0],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=ROOT / "benchmarks" / "prompts.jsonl")
    parser.add_argument("--per-category", type=int, default=5, help="prompts of each category (default 5)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft", default="auto", help="draft plan to measure (default: the artifact's)")
    parser.add_argument("--peers", nargs="*", default=["llama_cpp"], help="peers to measure one request at a time")
    parser.add_argument("--peer-prompts", type=int, default=13, help="prompts for the peers (default 13)")
    parser.add_argument("--batch-peers", nargs="*", default=[], help="peers to measure with 16 requests (vllm)")
    parser.add_argument("--quick", action="store_true", help="one prompt per category, 48 tokens, no peers")
    parser.add_argument("--out", type=Path, default=BUILD / "cpu.json")
    args = parser.parse_args()
    if args.quick:
        args.per_category, args.max_tokens, args.peers, args.batch_peers = 1, 48, [], []
    return args


def main() -> int:
    args = parse_arguments()
    BUILD.mkdir(parents=True, exist_ok=True)
    model = fetch_model(ROOT / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    artifact = compiled(model, ROOT / "ssm/smollm2-135m", ROOT / "build/smollm2.fspec")
    prompts = read_prompts(args.prompts, args.per_category)
    options = ServeOptions(draft=args.draft, threads=args.threads)
    with Bandwidth(args.threads) as bandwidth:
        bandwidth.sample()

        def note(done: int, of: int) -> None:
            print(f"\rprompt {done} of {of}", end="" if done < of else "\n", file=sys.stderr, flush=True)
            if done % 3 == 0:
                bandwidth.sample()

        result = compare(artifact, [p.text for p in prompts], args.max_tokens, options, note)
    peers = measure_peers(artifact, prompts, args)
    sixteen = [prompts[i % len(prompts)] for i in range(16)]
    batch = batch_rate(artifact, sixteen, usable_cores(), args.max_tokens)
    parameters = json.loads((artifact / "model.json").read_text())["models"][0]["parameter_bytes"]
    floor = bandwidth.median / parameters
    verify = measure_verify(artifact, sorted({1, usable_cores()}), 5 if args.quick else 15)
    report = {
        "threads": args.threads,
        "prompts": str(args.prompts.name),
        "requests": len(prompts),
        "max_new_tokens": args.max_tokens,
        "draft": args.draft,
        "off_tokens_per_s": round(result.off_tokens_per_s, 2),
        "tree_tokens_per_s": round(result.on_tokens_per_s, 2),
        "tree_over_off_median": round(result.ratio, 3),
        "tree_over_off_with_prefill_median": round(statistics.median(p.total_ratio for p in result.pairs), 3),
        "tree_over_off_by_category": by_category(prompts, result),
        "tokens_per_round_mean": round(result.tokens_per_round, 3),
        "nodes_per_round_mean": round(result.nodes_per_round, 2),
        "identical_outputs_share": result.identical_share,
        "overhead_share": round(result.overhead_share, 4),
        "draft_share": round(result.clock.draft_s / result.clock.total_s, 4),
        "gather_share": round(result.clock.gather_s / result.clock.total_s, 4),
        "verify_over_decode": verify["1"],
        "verify_over_decode_by_threads": verify,
        "read_bandwidth_bytes_per_s": bandwidth.report(),
        "weight_bytes": parameters,
        "floor_tokens_per_s": round(floor, 2),
        "off_over_floor": round(result.off_tokens_per_s / floor, 3),
        "batch_16_tokens_per_s": round(batch, 1),
        "cold_start": cold_start(artifact),
        **peers,
        "machine": machine(),
    }
    args.out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k not in ("machine",)}, indent=1))
    print(f"written to {args.out}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

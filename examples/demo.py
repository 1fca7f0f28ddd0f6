"""The whole path on a real model: fetch, compile with its SSM, serve, ask over HTTP, compare with speculation off.

    python examples/demo.py            fetch, compile, ask, compare, stop
    python examples/demo.py --stay     the same, then keep the server running

Everything is cached by content: the second run compiles nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.fetch_model import fetch_model  # noqa: E402
from benchmarks.measure import Comparison, compare  # noqa: E402

QUESTION = "List the planets of the solar system from the sun outwards, with one short sentence about each."
PROMPTS = (
    QUESTION,
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Extract all city names from this text: We flew from Oslo to Madrid, took a train to Lisbon, and sailed to Genoa.",
    "Explain in simple words why the sky is blue.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stay", action="store_true", help="keep the server running until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, help="port of the server (default: 8000 with --stay, else any)")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    began = time.monotonic()
    model = fetch_model(ROOT / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    artifact = compiled(model, ROOT / "ssm/smollm2-135m", ROOT / "build/smollm2.fspec")
    with Server(artifact, args.port or (8000 if args.stay else 0)) as server:
        print(f"\n> {QUESTION}\n")
        usage = chat(server.url, QUESTION, args.max_tokens)
        print(f"\n\nserver: {usage['completion_tokens']} tokens, {describe(usage['flexspec'])}")
        report(compare(artifact, PROMPTS, args.max_tokens))
        print(f"total time {time.monotonic() - began:.0f} s")
        if args.stay:
            print(f"\nserving on {server.url}/v1 until Ctrl-C; try\n  {curl(server.url)}")
            server.wait()
    return 0


def compiled(model: Path, ssm: Path, out: Path, *options: str) -> Path:
    """The artifact, compiled with ``options`` unless it was made from exactly these files by exactly this source."""
    key = content_key([model, *sorted(ssm.glob("*")), *sorted(source_files())])
    stamp = out.with_suffix(".key")
    if out.exists() and stamp.exists() and stamp.read_text() == key:
        print(f"compiled already: {out.relative_to(ROOT)}")
        return out
    inside = [str(path.relative_to(ROOT)) for path in (model, ssm, out)]  # the artifact records the command
    command = [sys.executable, "-m", "flexspec", "compile", inside[0], "--ssm", inside[1], "-o", inside[2]]
    subprocess.run([*command, *options], check=True, cwd=ROOT)
    stamp.write_text(key)
    return out


def source_files() -> Iterator[Path]:
    for folder in ("flexspec", "compiler", "kernels"):
        for pattern in ("*.py", "*.h"):
            yield from (ROOT / folder).rglob(pattern)


def content_key(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        if file.is_file():
            digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


class Server:
    """``flexspec serve`` as a child process, up when the block begins and gone when it ends."""

    def __init__(self, artifact: Path, port: int) -> None:
        self._artifact, self._port = artifact, port or free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Server:
        command = [sys.executable, "-m", "flexspec", "serve", str(self._artifact), "--port", str(self._port)]
        self._process = subprocess.Popen(command, cwd=ROOT)
        deadline = time.monotonic() + 60
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise SystemExit("the server did not come up; its messages are above")
            time.sleep(0.05)
        return self

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def peak_memory_bytes(self) -> int:
        """Largest resident size of the server so far."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024

    def wait(self) -> None:
        signal.signal(signal.SIGINT, lambda *_: self._process.send_signal(signal.SIGINT))
        self._process.wait()

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def chat(url: str, question: str, max_tokens: int) -> dict[str, Any]:
    """Stream one answer to the terminal; returns the usage block that ends the stream."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    usage: dict[str, Any] = {}
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
    return usage


def describe(stats: dict[str, Any]) -> str:
    rate = stats["tokens_per_round"]
    shown = f"{rate:.2f} tokens a round" if rate else "no rounds"
    return f"{shown}, {stats['drafted']} nodes drafted, {stats['accepted']} accepted in {stats['rounds']} rounds"


def report(result: Comparison) -> None:
    """What speculation did on a few prompts, against the same engine without it."""
    print(f"\nspeculation off against on, {len(result.pairs)} prompts, greedy, interleaved:")
    print(f"  tokens a round      {result.tokens_per_round:.2f}")
    print(f"  tree size           {result.nodes_per_round:.1f} nodes on average")
    print(f"  tokens/s            off {result.off_tokens_per_s:.1f}   on {result.on_tokens_per_s:.1f}")
    print(f"  speed-up            {result.ratio:.2f}x")
    print(f"  output identical:   {'yes' if result.identical_share == 1.0 else 'NO'}")


def curl(url: str) -> str:
    return (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        """-d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}'"""
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

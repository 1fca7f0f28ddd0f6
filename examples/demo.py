"""All of flexspec on a real model: fetch, compile with its SSM, serve, ask over HTTP, compare with speculation off.

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
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.fetch_model import fetch_model  # noqa: E402
from benchmarks.measure import Comparison, compare  # noqa: E402
from flexspec.host.exits import describe_exit  # noqa: E402

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
        report(PROMPTS, compare(artifact, PROMPTS, args.max_tokens))
        print(f"total time {time.monotonic() - began:.0f} s")
        if args.stay:
            print(f"\nserving on {server.url}/v1 until Ctrl-C; try\n  {curl(server.url)}")
            return server.wait()
    return 0


def compiled(model: Path, ssm: Path, out: Path, *options: str) -> Path:
    """The artifact, compiled with ``options`` unless it already comes from exactly these files and this source."""
    key = content_key([model, *sorted(ssm.glob("*")), *sorted(source_files())])
    stamp = out.with_suffix(".key")
    if out.exists() and stamp.exists() and stamp.read_text() == key:
        print(f"already compiled: {out.relative_to(ROOT)}")
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
    """``flexspec serve`` as a child process, up when the block begins and stopped when it ends.

    Its stderr is forwarded to ours; the last lines are kept for the message when it dies.
    """

    progress_every_s = 5.0

    def __init__(self, artifact: Path, port: int) -> None:
        self._artifact, self._port = artifact, port or free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._last_lines: deque[str] = deque(maxlen=10)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "flexspec", "serve", str(self._artifact), "--port", str(self._port)]

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(self.command(), cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace")
        self._reader = threading.Thread(target=self._forward_stderr, daemon=True)
        self._reader.start()
        try:
            self._wait_until_up()
        except BaseException:  # Ctrl-C too: no block follows that would end the child
            self.__exit__()
            raise
        return self

    def _wait_until_up(self) -> None:
        """Wait while the child lives: a slow machine or disk is no failure. Raises SystemExit when it has ended."""
        began = reported = time.monotonic()
        while not self._healthy():
            if (code := self._process.poll()) is not None:
                self._reader.join()
                lines = "".join(f"\n  {line}" for line in self._last_lines) or " nothing"
                raise SystemExit(f"the server ended before it was up ({describe_exit(code)}); its last lines:{lines}")
            if time.monotonic() - reported > self.progress_every_s:
                reported = time.monotonic()
                print(f"the server is starting: {reported - began:.0f} s (Ctrl-C stops)", file=sys.stderr, flush=True)
            time.sleep(0.05)

    def _forward_stderr(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            self._last_lines.append(line.rstrip())

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

    def wait(self) -> int:
        """Wait until the server ends; returns its exit code. A terminal's Ctrl-C reaches the server by itself."""

        def interrupt(*_: object) -> None:
            if not os.isatty(0):  # a second SIGINT would end the server at once, its answers unfinished
                self._process.send_signal(signal.SIGINT)

        signal.signal(signal.SIGINT, interrupt)
        return self._process.wait()

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()


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


def report(prompts: Sequence[str], result: Comparison) -> None:
    """Compare a few prompts with and without speculation in the same engine.

    The rows have all numbers that the figures below them come from; times and tokens are those after the first token.
    """
    count = len(result.pairs)
    print(f"\nspeculation off against on, {count} prompts, greedy, one after the other in turns:\n")
    print(f"  {'prompt':<32}  tokens  rounds   off s    on s  off/on  identical")
    for prompt, pair in zip(prompts, result.pairs, strict=True):
        off, on = pair.off.stats, pair.on.stats
        shown = prompt if len(prompt) <= 32 else prompt[:29] + "..."
        print(
            f"  {shown:<32}  {on.completion_tokens - 1:6}  {on.rounds:6}  {off.decode_s:6.3f}  {on.decode_s:6.3f}  "
            f"{pair.ratio:6.2f}  {'yes' if pair.identical else 'NO':>9}"
        )
    print(f"\n  speed-up            {result.ratio:.2f}x, the median of {count} pairs (off/on)")
    print(
        f"  tokens/s            off {result.off_tokens_per_s:.1f}   on {result.on_tokens_per_s:.1f}, "
        "all tokens over all seconds"
    )
    print(f"  tokens a round      {result.tokens_per_round:.2f}, all tokens over all rounds")
    print(f"  tree size           {result.nodes_per_round:.1f} nodes on average")
    print(f"  output identical    {'yes' if result.identical_share == 1.0 else 'NO'}")


def curl(url: str) -> str:
    """A request to paste: greedy, since a small model answers best that way, and streamed (-N: unbuffered)."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 128,
        "temperature": 0,
        "stream": True,
    }
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

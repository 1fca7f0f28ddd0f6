"""What does a prompt of megabytes cost everybody else? One stream runs while each body is posted.

    python benchmarks/long_prompts.py build/smollm2.fspec

Prints for each body the status, its seconds, the longest gap between two events of the stream, and how far the server's
peak memory rose. Exit code 1 if one is answered after 0.5 s, a gap is over 0.2 s or memory rose by 80 MB.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples.demo import Server  # noqa: E402

SIZE = 7_900_000  # under the limit of a body
MAX_SECONDS, MAX_GAP_S, MAX_GROWN_BYTES = 0.5, 0.2, 80_000_000
TEXTS = {"words": "a b ", "letters": "a", "accents": "\u00e9", "blanks": " ", "digits": "1234567890"}


class NamedServer(Server):
    """The demo's server, whose model is called m."""

    def command(self) -> list[str]:
        return [*super().command(), "--name", "m", "--threads", "1"]

    def peak_bytes(self) -> int:
        rows = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("VmHWM"))


class Stream(threading.Thread):
    """A stream of tokens that notes the longest gap between two of its events."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__(daemon=True)
        body = {"model": model, "prompt": "Count:", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        self._request = request(f"{url}/v1/completions", json.dumps(body).encode())
        self.gap_s = 0.0
        self.ended = False

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=120) as answer:
            last = None
            for line in answer:
                if self.ended:
                    return
                now = time.monotonic()
                if line.startswith(b"data:"):
                    self.gap_s = max(self.gap_s, now - last) if last is not None else 0.0
                    last = now


def request(url: str, data: bytes) -> urllib.request.Request:
    return urllib.request.Request(url, data, {"Content-Type": "application/json"})


def post(url: str, data: bytes) -> tuple[int, float]:
    """Status and seconds of one request."""
    began = time.monotonic()
    try:
        with urllib.request.urlopen(request(url, data), timeout=300) as answer:
            answer.read()
            status = answer.status
    except urllib.error.HTTPError as error:
        error.read()
        status = error.code
    return status, time.monotonic() - began


def bodies(model: str) -> dict[str, tuple[str, bytes]]:
    """Path and bytes of each request, by name."""
    size = SIZE - 200
    made: dict[str, tuple[str, dict[str, object]]] = {
        name: ("/v1/completions", {"model": model, "prompt": text * (size // len(text.encode()))})
        for name, text in TEXTS.items()
    }
    content = TEXTS["words"] * (size // 4)
    made["chat"] = ("/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": content}]})
    many = [{"role": "user", "content": "a"}] * 200_000
    made["200,000 messages"] = ("/v1/chat/completions", {"model": model, "messages": many})
    made["128 prompts"] = ("/v1/completions", {"model": model, "prompt": [TEXTS["words"] * 15_000] * 128})
    return {name: (path, json.dumps(body, ensure_ascii=False).encode()) for name, (path, body) in made.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    args = parser.parse_args()
    failed = 0
    server = NamedServer(args.artifact, 0)
    with server:
        print(f"{'body':20}{'status':>8}{'seconds':>10}{'gap s':>8}{'memory +MB':>12}")
        for name, (path, data) in bodies("m").items():
            stream = Stream(server.url, "m")
            stream.start()
            time.sleep(1.0)
            before, stream.gap_s = server.peak_bytes(), 0.0
            status, seconds = post(server.url + path, data)
            stream.ended = True
            stream.join()
            gap_s, grown = stream.gap_s, server.peak_bytes() - before
            print(f"{name:20}{status:>8}{seconds:>10.2f}{gap_s:>8.2f}{grown / 1e6:>12.0f}", flush=True)
            failed += seconds > MAX_SECONDS or gap_s > MAX_GAP_S or grown > MAX_GROWN_BYTES
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

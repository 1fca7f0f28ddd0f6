"""The demo: a server that is slow or dies while it starts, figures that can be recomputed, the request to paste."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks.measure import Comparison, Pair
from examples.demo import Server, curl, report
from flexspec.runtime.engine.api import RequestStats
from flexspec.runtime.engine.complete import Completion
from flexspec.runtime.engine.engine import Clock

SLOW_START = """
import sys, time, http.server
print("loading", file=sys.stderr, flush=True)
time.sleep(1)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


class Scripted(Server):
    progress_every_s = 0.2

    def __init__(self, script: str) -> None:
        super().__init__(Path("none.fspec"), 0)
        self._script = script

    def command(self) -> list[str]:
        return [sys.executable, "-c", self._script, str(self._port)]


def test_a_slow_server_is_waited_for_and_spoken_of(capfd: pytest.CaptureFixture[str]) -> None:
    with Scripted(SLOW_START) as server:
        assert server.peak_memory_bytes() > 0
    said = capfd.readouterr().err
    assert "loading" in said and re.search(r"the server is starting: \d+ s", said)


@pytest.mark.parametrize(
    ("end", "how"), [("sys.exit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "killed by SIGKILL")]
)
def test_a_server_that_dies_is_quoted(end: str, how: str) -> None:
    with pytest.raises(SystemExit) as caught, Scripted(f"import os, sys; print('no memory', file=sys.stderr); {end}"):
        pass
    assert how in str(caught.value) and str(caught.value).endswith("its last lines:\n  no memory")


def pair(tokens: int, off_s: float, on_s: float, rounds: int) -> Pair:
    off = RequestStats(completion_tokens=tokens, rounds=tokens - 1, decode_s=off_s)
    on = RequestStats(completion_tokens=tokens, rounds=rounds, drafted=4 * rounds, decode_s=on_s)
    return Pair(Completion(None, (), (1,), "", "length", off), Completion(None, (), (1,), "", "length", on))


def test_figures_can_be_recomputed_from_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = (pair(101, 2.0, 1.0, 40), pair(51, 1.0, 0.8, 40), pair(11, 0.3, 0.1, 5))
    report(["a" * 40, "b", "c"], Comparison(pairs, Clock(1.0, 0.5, 0.0, 2.0)))
    page = capsys.readouterr().out
    rows = re.findall(r"^  (\S+) +(\d+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +yes$", page, re.MULTILINE)
    assert [row[0] for row in rows] == ["a" * 29 + "...", "b", "c"]
    tokens, rounds, off_s, on_s, ratios = (sum(float(row[i]) for row in rows) for i in range(1, 6))
    assert "2.00x, the median of 3 pairs" in page and ratios == pytest.approx(2.0 + 1.25 + 3.0)
    assert f"off {tokens / off_s:.1f}   on {tokens / on_s:.1f}" in page
    assert f"{tokens / rounds:.2f}, all tokens over all rounds" in page


def test_the_request_to_paste_is_greedy_short_and_streamed() -> None:
    words = shlex.split(curl("http://127.0.0.1:8000"))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[-1])
    assert body["temperature"] == 0 and body["max_tokens"] > 0 and body["stream"] is True

"""Do several ranks answer over HTTP as one rank does? Every prompt, by each artifact's plan, speculation off and on.

    python benchmarks/ranks_http.py tp2.fspec pp2.fspec ragged.fspec --count 32 --tokens 48

The artifacts are of one model, from ``flexspec compile --dtype f32 --plan``; the reference is one process with
speculation off. Greedy chat answers, ``--together`` requests at once, so that prompts enter while others decode. Prints
one row per run. Exit code 1 if a token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peers.prepare import read_prompts  # noqa: E402
from examples.demo import Server  # noqa: E402
from flexspec.compiler.artifact import layout  # noqa: E402
from flexspec.compiler.artifact.opened import OpenedArtifact  # noqa: E402
from flexspec.runtime.text.tokenizer import Tokenizer  # noqa: E402

HEADER = f"{'artifact':22}{'ranks':>6} {'draft':6}{'tokens':>8}{'tokens/round':>14}{'tokens/s':>10}{'differing':>11}"


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """One answer over HTTP."""

    text: str
    tokens: int
    rounds: int
    from_rounds: float  # tokens of rounds, without the first token, which comes from the prefill


@dataclass(frozen=True, slots=True)
class Run:
    answers: tuple[HttpAnswer, ...]
    seconds: float


class RankServer(Server):
    """The demo's server with options of its own."""

    def __init__(self, artifact: Path, *options: str) -> None:
        super().__init__(artifact, 0)
        self._options = options

    def command(self) -> list[str]:
        return [*super().command(), "--name", "m", *self._options]


def ask(url: str, prompt: str, tokens: int) -> HttpAnswer:
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=900) as answer:
        reply: dict[str, Any] = json.load(answer)
    usage = reply["usage"]
    rounds = usage["flexspec"]["rounds"]
    from_rounds = rounds * (usage["flexspec"]["tokens_per_round"] or 0)
    return HttpAnswer(reply["choices"][0]["message"]["content"], usage["completion_tokens"], rounds, from_rounds)


def run(artifact: Path, ranks: int, draft: str, prompts: Sequence[str], args: argparse.Namespace) -> Run:
    """All prompts by one server, after a first one that is not measured."""
    threads = ("--threads", str(args.threads)) if ranks == 1 else ("--threads", "1", "--ranks", str(ranks))
    with RankServer(artifact, "--draft", draft, *threads) as server, ThreadPoolExecutor(args.together) as pool:
        ask(server.url, prompts[0], 4)
        began = time.perf_counter()
        answers = tuple(pool.map(lambda prompt: ask(server.url, prompt, args.tokens), prompts))
        return Run(answers, time.perf_counter() - began)


def differing(tokenizer: Tokenizer, wanted: Run, result: Run) -> int:
    """Tokens that differ at their place, or that only one of the answers has."""
    total = 0
    for right, other in zip(wanted.answers, result.answers, strict=True):
        pair = [tokenizer.encode(answer.text, add_special=False) for answer in (right, other)]
        total += sum(a != b for a, b in zip(*pair, strict=False)) + abs(len(pair[0]) - len(pair[1]))
        total += abs(right.tokens - other.tokens)
    return total


def row(name: str, ranks: int, draft: str, result: Run, wrong: int) -> str:
    tokens, rounds = sum(a.tokens for a in result.answers), sum(a.rounds for a in result.answers)
    per_round = sum(a.from_rounds for a in result.answers) / max(1, rounds)
    return f"{name:22}{ranks:6} {draft:6}{tokens:8}{per_round:14.3f}{tokens / result.seconds:10.1f}{wrong:11}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--prompts", type=Path, default=ROOT / "benchmarks" / "prompts.jsonl")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer (default 48)")
    parser.add_argument("--together", type=int, default=4, help="requests in flight (default 4)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the one process (default 1); a rank has 1")
    args = parser.parse_args()
    prompts = [str(prompt["turns"][0]) for prompt in read_prompts(args.prompts)[: args.count]]
    opened = [OpenedArtifact.at(path) for path in args.artifacts]
    tokenizer = Tokenizer(opened[0].files.read_bytes(layout.TOKENIZER), ())
    print(f"{len(prompts)} prompts, {args.together} at once, at most {args.tokens} tokens an answer\n{HEADER}")
    wanted = run(args.artifacts[0], 1, "off", prompts, args)
    print(row(args.artifacts[0].name, 1, "off", wanted, 0), flush=True)
    total = 0
    for path, artifact in zip(args.artifacts, opened, strict=True):
        ranks = len(artifact.ranks)
        for draft in ("off", "auto"):
            result = run(path, ranks, draft, prompts, args)
            wrong = differing(tokenizer, wanted, result)
            total += wrong
            print(row(path.name, ranks, draft, result, wrong), flush=True)
    print(f"{total} tokens differ")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())

"""Kills ranks, or their launcher, at random moments, and checks that nothing hangs and nothing is left behind.

    python benchmarks/kill_ranks.py X.fspec --ranks 2 --times 20 --seed 1
    python benchmarks/kill_ranks.py X.fspec --ranks 2 --times 20 --restart

X.fspec comes from ``flexspec compile --plan``. A few clients stream answers all the time. After each SIGKILL every
request in flight must end with an error or a closed connection within 5 s; without --restart the command must exit
non-zero, no process of it may be left (found through /proc by a mark in their environment) and its port must be free,
all within 5 s too; with --restart the ranks must serve again, on the same port, the same answer as before. Some kills
come during startup. The first violation ends the run with exit code 1. Linux.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
CLIENTS = 3
ENDS_WITHIN_S = 5.0
STARTS_WITHIN_S = 180.0
SERVING_S = 3.0  # a kill comes at most so long after clients began
IN_START = 0.3  # share of the kills that come before ranks serve
MARK = "FLEXSPEC_KILL_RANKS"
PROMPTS = ("Why is the sky blue?", "Write a long story about a lighthouse.", "hello hello hello", "Count to a hundred.")
LAUNCHER = -1


class ViolationError(Exception):
    """Something hung or was left behind."""


class Client(threading.Thread):
    """Streams one answer after another."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.stopping = threading.Event()
        self.since: float | None = None  # when the answer in flight was connected
        self.ended: list[tuple[float, str]] = []  # when and how each answer ended
        self._port = port

    def run(self) -> None:
        chance = random.Random()
        while not self.stopping.wait(0.02):
            try:
                outcome = self._ask(chance.choice(PROMPTS))
            except (OSError, http.client.HTTPException):
                outcome = "closed"
            if self.since is not None:
                self.since = None  # first: if a reader sees a time here, its end is still to be added
                self.ended.append((time.monotonic(), outcome))

    def _ask(self, prompt: str) -> str:
        with socket.create_connection((HOST, self._port), timeout=STARTS_WITHIN_S) as connected:
            self.since = time.monotonic()
            connection = http.client.HTTPConnection(HOST, self._port)
            connection.sock = connected
            connection.request("POST", "/v1/completions", body(prompt, 200, stream=True), HEADERS)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
            if 400 <= answer.status < 500:
                return "refused"
            if '"error"' in text or '"cancelled"' in text:
                return "error"
            return "done" if answer.status == 200 and "[DONE]" in text else "closed"


HEADERS = {"Content-Type": "application/json"}


def body(prompt: str, tokens: int, *, stream: bool) -> str:
    return json.dumps({"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream})


class Server:
    """``flexspec serve`` with all processes that it starts, identified by a mark in their environment."""

    def __init__(self, artifact: Path, ranks: int, more: list[str]) -> None:
        with socket.create_server((HOST, 0)) as free:
            self.port = int(free.getsockname()[1])
        self._mark = f"{MARK}={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        arguments = [str(artifact), "--name", "m", "--ranks", str(ranks), "--port", str(self.port), *more]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flexspec", "serve", *arguments], stderr=self.log,
            env={**os.environ, name: value, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.ranks = ranks

    def processes(self) -> Mapping[int, int]:
        """Running process ids of this server -> rank; the launcher's is -1."""
        ranks = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # ended, or another user's
            if self._mark in words:
                rank = next((word[5:] for word in words if word.startswith("RANK=")), str(LAUNCHER))
                ranks[int(entry.name)] = int(rank)
        return ranks

    def kill(self, victim: int, *, after: frozenset[int] = frozenset()) -> float:
        """SIGKILL the rank once it runs, but no process of ``after``; returns the time."""
        give_up = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < give_up:
            for process, rank in self.processes().items():
                if rank == victim and process not in after:
                    os.kill(process, signal.SIGKILL)
                    return time.monotonic()
            if self.process.poll() is not None:
                break
            time.sleep(0.005)
        raise ViolationError(f"rank {victim} did not start: {self.log_text()}")

    def answer(self) -> str:
        """A short greedy answer, once the server returns one."""
        give_up = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < give_up and self.process.poll() is None:
            connection = http.client.HTTPConnection(HOST, self.port, timeout=STARTS_WITHIN_S)
            try:
                connection.request("POST", "/v1/completions", body("hello there", 24, stream=False), HEADERS)
                answer = json.loads(connection.getresponse().read())
                if "choices" in answer:
                    return str(answer["choices"][0]["text"])
            except (OSError, http.client.HTTPException, ValueError):
                pass
            finally:
                connection.close()
            time.sleep(0.05)
        raise ViolationError(f"no answer: {self.log_text()}")

    def log_text(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def listens(self) -> bool:
        with socket.socket() as asking:
            return asking.connect_ex((HOST, self.port)) == 0

    def close(self) -> None:
        """Kill what is left; only needed after a violation."""
        for process in self.processes():
            os.kill(process, signal.SIGKILL)
        self.process.wait()
        self.log.close()


def wait_for(what: str, done: Callable[[], bool], since: float) -> float:
    """Seconds from ``since`` until ``done``. Raises ViolationError after five."""
    while not done():
        if time.monotonic() - since > ENDS_WITHIN_S:
            raise ViolationError(f"{what} after {ENDS_WITHIN_S:.0f} s")
        time.sleep(0.01)
    return time.monotonic() - since


def flights_end(clients: list[Client], killed: float) -> tuple[int, float, str]:
    """Requests in flight at a kill: how many, seconds until the last one had ended, and how they ended."""
    counts = [len(client.ended) for client in clients]
    in_flight = [(c, n) for c, n in zip(clients, counts, strict=True) if (since := c.since) and since < killed]
    wait_for("a request in flight has not ended", lambda: all(len(c.ended) > n for c, n in in_flight), killed)
    ends = [client.ended[n] for client, n in in_flight]
    if any(outcome == "refused" for client in clients for _, outcome in client.ended):
        raise ViolationError("the server refuses the clients' requests")
    last = max((when - killed for when, _ in ends), default=0.0)
    return len(in_flight), max(last, 0.0), " ".join(sorted(outcome for _, outcome in ends)) or "-"


def moment(chance: random.Random, start_s: float) -> tuple[bool, float]:
    """Whether a kill comes during startup, and seconds to wait: from the start, or from the first answer."""
    starts = chance.random() < IN_START
    return starts, chance.uniform(0, start_s if starts else SERVING_S)


def name_of(victim: int) -> str:
    return "launcher" if victim == LAUNCHER else f"rank {victim}"


def kill_once(args: argparse.Namespace, chance: random.Random, start_s: float) -> str:
    """One server, one kill; returns its row of the table."""
    victim = chance.randrange(LAUNCHER, args.ranks)
    starts, wait_s = moment(chance, start_s)
    server = Server(args.artifact, args.ranks, args.serve)
    clients = [Client(server.port) for _ in range(CLIENTS)]
    try:
        for client in clients:
            client.start()
        if not starts:
            server.answer()
        time.sleep(wait_s)
        killed = server.kill(victim)
        count, ended_s, outcomes = flights_end(clients, killed)
        exit_s = wait_for("the command has not ended", lambda: server.process.poll() is not None, killed)
        code = server.process.returncode
        left_s = wait_for("processes are left", lambda: not server.processes(), killed)
        wait_for("the port is taken", lambda: not server.listens(), killed)
        if code == 0:
            raise ViolationError("the exit code is 0")
        return (
            f"{'start' if starts else 'serving':8}{wait_s:7.2f}  {name_of(victim):10}{count:3}  {ended_s:6.2f}  "
            f"{outcomes:22}{code:4}  {exit_s:6.2f}  {left_s:6.2f}"
        )
    except ViolationError as error:
        raise ViolationError(f"{name_of(victim)}, {'start' if starts else 'serving'} {wait_s:.2f}: {error}") from None
    finally:
        for client in clients:
            client.stopping.set()
        server.close()


def kill_again(args: argparse.Namespace, chance: random.Random, start_s: float) -> None:
    """One server that restarts after each kill; prints the table."""
    print(f"{'moment':8}{'s':>7}  {'killed':10}{'in flight':>9}  {'ended s':>7}  {'how':22}serves again s")
    server = Server(args.artifact, args.ranks, ["--restart", str(args.times), *args.serve])
    clients = [Client(server.port) for _ in range(CLIENTS)]
    try:
        wanted = server.answer()
        for client in clients:
            client.start()
        before: frozenset[int] = frozenset()
        starts, wait_s = False, chance.uniform(0, SERVING_S)
        for number in range(args.times):
            time.sleep(wait_s)
            victim = chance.randrange(args.ranks)
            running = frozenset(server.processes())
            killed = server.kill(victim, after=before)
            before = before | running
            count, ended_s, outcomes = flights_end(clients, killed)
            row = f"{'start' if starts else 'serving':8}{wait_s:7.2f}  {name_of(victim):10}{count:9}"
            row += f"  {ended_s:7.2f}  {outcomes:22}"
            starts, wait_s = moment(chance, start_s)
            if not starts or number == args.times - 1:
                if server.answer() != wanted:
                    raise ViolationError("another answer than before")
                row += f"{time.monotonic() - killed:6.2f}"
            print(row, flush=True)
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(60)
        left = len(server.processes())
        if code or left or server.listens():
            raise ViolationError(f"after SIGTERM: exit code {code}, {left} processes, {server.log_text()}")
        print("SIGTERM: exit code 0, no process left")
    finally:
        for client in clients:
            client.stopping.set()
        server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--restart", action="store_true", help="kill ranks of one server that restarts them")
    parser.add_argument("--serve", nargs="*", default=["--threads", "1", "--no-checks", "--kv-tokens", "4096"])
    args = parser.parse_args()
    chance = random.Random(args.seed)
    began = time.monotonic()
    first = Server(args.artifact, args.ranks, args.serve)
    try:
        first.answer()
        start_s = time.monotonic() - began
    finally:
        first.close()
    print(f"{args.artifact.name}, {args.ranks} ranks, seed {args.seed}; starts in {start_s:.1f} s")
    try:
        if args.restart:
            kill_again(args, chance, start_s)
            return 0
        print(f"{'moment':8}{'s':>7}  {'killed':10}{'in flight':>3}  ended s  {'how':22}exit  exit s  all gone s")
        for _ in range(args.times):
            print(kill_once(args, chance, start_s), flush=True)
    except ViolationError as error:
        print(f"VIOLATION: {error}")
        return 1
    print(f"{args.times} kills, no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())

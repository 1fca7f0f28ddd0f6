"""``flexspec serve --ranks N --restart``: starts ranks, forwards signals, restarts, and reports how it ended."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from flexspec.cli.ranks import LAST_WORDS, LAUNCHER
from flexspec.errors import CapacityError, PlanError, ToolchainError
from flexspec.host.exits import GONE, describe_exit

MAX_RANKS = 1024
MAX_RESTARTS = 1000
RESTARTS = 3  # --restart without a number
_ROW_ENDS_S = 600.0  # once ranks have run this long, restarts are counted from zero again


@dataclass(frozen=True, slots=True)
class Ending:
    """Why ranks ended, in a sentence, and the command's exit code for it."""

    code: int
    why: str


def restart_count(text: str) -> int:
    """The value of ``--restart``."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number (write --restart after the artifact)") from None


def launch(args: argparse.Namespace) -> NoReturn:
    """Serve with ranks on this machine until a signal or until they end; this process ends with them.

    User errors are refused before anything is started: raises ArtifactError, CapacityError, PlanError, PortError,
    ToolchainError. Exits without tearing down torch, which takes seconds on a busy machine.
    """
    port = _check(args)
    arguments = [*sys.argv[1:], "--port", str(port)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun sets too, with a warning
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    os.environ[LAUNCHER] = str(os.getpid())
    words = Path(tempfile.mkdtemp(prefix="flexspec-"))
    os.environ[LAST_WORDS] = str(words)
    signals, stops = _catch_signals()
    try:
        code = _keep_running(arguments, args.ranks, args.restart, words, signals, stops)
    finally:
        shutil.rmtree(words, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _check(args: argparse.Namespace) -> int:
    """The port to serve on, if ranks can be started."""
    from flexspec.cli.serving.http_options import reserve_address
    from flexspec.compiler.artifact.opened import OpenedArtifact
    from flexspec.compiler.artifact.rank_record import several_ranks

    if not 1 <= args.ranks <= MAX_RANKS:
        raise CapacityError(f"--ranks {args.ranks}", f"1 to {MAX_RANKS}", "pass the number of ranks of the plan")
    if not 0 <= args.restart <= MAX_RESTARTS:
        raise CapacityError(f"--restart {args.restart}", f"0 to {MAX_RESTARTS}", "choose a number in that range")
    if importlib.util.find_spec("torch") is None:
        option = f"--ranks {args.ranks}" if args.ranks > 1 else "--restart"
        raise ToolchainError(f"{option} without PyTorch", "torch >= 2.11", "pip install torch")
    artifact = OpenedArtifact.at(args.artifact, check_digests=False)
    if args.ranks > 1:
        planned = len(several_ranks(artifact.ranks, artifact.name))
        if planned != args.ranks:
            raise PlanError(
                f"{args.ranks} ranks", f"{planned}, as in the artifact's plan", f"start it with --ranks {planned}"
            )
    with reserve_address(args) as listener:  # released at once: rank 0 takes it after its start
        port = listener.port
    return port if args.restart else args.port  # a port that the system chose must survive restarts


def _catch_signals() -> tuple[list[int], list[int]]:
    """Signals not yet forwarded to rank 0, and all signals received."""
    waiting: list[int] = []
    received: list[int] = []

    def catch(number: int, _: FrameType | None) -> None:
        waiting.append(number)
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, catch)
    return waiting, received


def _keep_running(
    arguments: Sequence[str], ranks: int, restarts: int, words: Path, signals: list[int], stops: list[int]
) -> int:
    from flexspec.runtime.distributed.launch import run_ranks

    used = 0
    while True:
        began = time.monotonic()
        failed = run_ranks("flexspec", arguments, ranks, signals)
        reasons = {int(path.name): path.read_text() for path in words.iterdir()}
        if stops:
            ending = stopped(failed, reasons)
        elif failed:
            ending = judge(failed, reasons)
        else:
            return 0
        used = 0 if time.monotonic() - began >= _ROW_ENDS_S else used
        if stops or ending.code == 2 or used == restarts:
            again = f"; no restarts left of {restarts}" if restarts and not stops and ending.code != 2 else ""
            if ending.why:
                print(f"flexspec serve: {ending.why}{again}", file=sys.stderr, flush=True)
            return ending.code
        used += 1
        print(f"flexspec serve: {ending.why}; starting again ({used} of {restarts})", file=sys.stderr, flush=True)
        for path in words.iterdir():
            path.unlink()


def judge(failed: Mapping[int, int], reasons: Mapping[int, str]) -> Ending:
    """The ending of the rank that made the others fail. ``failed``: exit codes; ``reasons``: last words, by rank.

    A user error comes first (exit code 2), then a rank that was killed, then one that failed by itself. SIGTERM is what
    the agent sends to the others.
    """

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        code = failed[rank]
        return code != 2, code >= 0 or code == -signal.SIGTERM, GONE in reasons.get(rank, GONE), rank

    first = min(failed, key=order)
    code = 2 if failed[first] == 2 else 1
    why = f": {reasons[first]}" if first in reasons else f" ended ({describe_exit(failed[first])})"
    return Ending(code, f"rank {first}{why}")


def stopped(failed: Mapping[int, int], reasons: Mapping[int, str]) -> Ending:
    """The ending after a signal: that of rank 0, unless another rank failed."""
    if not failed:
        return Ending(0, "")
    code = failed.get(0)
    if code is None:
        return judge(failed, reasons)
    if code < 0 or code > 2:  # killed by the signal before it served, or by a second signal
        return Ending(128 - code if code < 0 else code, "")
    return judge(failed, reasons)

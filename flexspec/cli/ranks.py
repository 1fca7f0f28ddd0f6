"""Runs one rank of ``flexspec serve`` until its process ends. ``launch.py`` starts them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flexspec.errors import CapacityError, EngineError, FlexspecError, ToolchainError
from flexspec.host.exits import rank_gone
from flexspec.runtime.distributed.processes import this_rank

if TYPE_CHECKING:
    from flexspec.runtime.open.engine import OpenLlm
    from flexspec.runtime.open.serve_options import ServeOptions

# Set only by launch.py, for the ranks that it starts.
LAUNCHER = "FLEXSPEC_LAUNCHER"  # its process id
LAST_WORDS = "FLEXSPEC_LAST_WORDS"  # a folder in which each rank writes why it ended; the launcher reports it once
_PR_SET_PDEATHSIG = 1


def is_rank() -> bool:
    """Whether this process was started as a rank, by ``launch.py`` or by torchrun, even as the only one."""
    return this_rank().ranks > 1 or LAUNCHER in os.environ


def check_launched(restart: int) -> None:
    """Say which rank this is if torchrun's variables made it one.

    Raises CapacityError for ``--restart`` then: only torchrun can restart it.
    """
    if restart and LAUNCHER not in os.environ:
        raise CapacityError(
            "--restart under torchrun", "--restart with --ranks", "pass --max-restarts to torchrun instead"
        )
    place = this_rank()
    if LAUNCHER not in os.environ and place.rank == 0:  # variables that a shell inherited would have it wait for others
        told = f"rank 0 of {place.ranks}, as RANK and WORLD_SIZE say (unset them to serve alone)"
        print(f"flexspec serve: {told}", file=sys.stderr, flush=True)


def run_rank(artifact: Path, options: ServeOptions, serve: Callable[[OpenLlm | None], int]) -> NoReturn:
    """Run as one rank until the process ends: rank 0 runs ``serve``, the others follow it.

    Exits without tearing down torch, whose threads may wait for dead ranks. Exit codes are those of the command.
    """
    code, reason = 1, ""
    try:
        _end_with_launcher()
        code = _run(artifact, options, serve)
    except FlexspecError as error:
        code, reason = 1 if isinstance(error, EngineError) else 2, str(error)
    except KeyboardInterrupt:
        code = 130
    except RuntimeError as error:  # torch.distributed's
        reason = rank_gone(error)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        reason = f"{type(error).__name__}, a bug in flexspec: {error}"
    if reason:
        report_end(reason)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report_end(why: str) -> None:
    """Report why this process ends: on stderr, or to the launcher, which picks the reason that matters."""
    folder, place = os.environ.get(LAST_WORDS), this_rank()
    if folder and Path(folder).is_dir():
        (Path(folder) / str(place.rank)).write_text(why)
    else:
        print(f"flexspec serve: {f'rank {place.rank}: ' if place.launched else ''}{why}", file=sys.stderr, flush=True)


def _run(artifact: Path, options: ServeOptions, serve: Callable[[OpenLlm | None], int]) -> int:
    place = this_rank()
    if place.ranks == 1:
        return serve(None)
    try:
        from flexspec.runtime.open.ranks import open_leader, run_follower
    except ImportError as error:
        raise ToolchainError(f"several ranks without PyTorch ({error})", "torch >= 2.11", "pip install torch") from None
    if place.rank == 0:
        return serve(open_leader)
    run_follower(artifact, options)
    return 0


def _end_with_launcher() -> None:
    """Have the kernel end this process when the launcher dies (Linux).

    Before anything slow: a launcher that dies while its ranks start must not leave them running. SIGKILL even for
    rank 0: the signal may come once per thread of the launcher, and a second SIGTERM would cut answers short anyway.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ.get(LAUNCHER)
    if launcher and os.getppid() != int(launcher):  # it died before prctl
        os._exit(1)

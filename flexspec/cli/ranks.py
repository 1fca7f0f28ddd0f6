"""Processes of ``flexspec serve``: starting them by torchrun, and being one of them."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flexspec.errors import CapacityError, FlexspecError, ToolchainError

if TYPE_CHECKING:
    from flexspec.runtime.open_engine import OpenLlm, ServeOptions

MOST_RANKS = 1024


def world_size() -> int:
    """How many ranks the launcher started; 1 without one."""
    try:
        return int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        raise CapacityError(f"WORLD_SIZE={os.environ['WORLD_SIZE']!r}", "a number", "start it by torchrun") from None


def launch_ranks(ranks: int) -> NoReturn:
    """Become torchrun, which starts this command ``ranks`` times. Raises CapacityError, ToolchainError."""
    if not 1 < ranks <= MOST_RANKS:
        raise CapacityError(f"--ranks {ranks}", f"1 to {MOST_RANKS}", "give the number of ranks of the artifact's plan")
    if importlib.util.find_spec("torch") is None:
        raise ToolchainError(f"--ranks {ranks} without PyTorch", "torch >= 2.11", "pip install torch")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun sets too, with a warning
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's own name may not resolve
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    os.execv(sys.executable, [*launcher, "-m", "flexspec", *sys.argv[1:]])


def run_rank(artifact: Path, options: ServeOptions, serve: Callable[[OpenLlm], int]) -> NoReturn:
    """Be one rank, to the end of the process: rank 0 runs ``serve``, the others follow it.

    Leaves without tearing down torch, whose threads may wait for ranks that are gone. Exit codes as of the command.
    """
    code, said = 1, ""
    try:
        code = _run(artifact, options, serve)
    except FlexspecError as error:
        code, said = 2, str(error)
    except KeyboardInterrupt:
        code = 130
    except RuntimeError as error:  # torch.distributed's
        said = f"another rank is gone or silent ({str(error).splitlines()[0]})"
    except BaseException:
        import traceback

        said = traceback.format_exc()
    if said:
        print(f"flexspec serve: rank {os.environ.get('RANK', '?')}: {said}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(artifact: Path, options: ServeOptions, serve: Callable[[OpenLlm], int]) -> int:
    try:
        from flexspec.runtime.distributed_open import end_with_parent, open_leader, run_follower
    except ImportError as error:
        raise ToolchainError(f"several ranks without PyTorch ({error})", "torch >= 2.11", "pip install torch") from None
    if os.environ.get("RANK") == "0":
        end_with_parent(signal.SIGTERM)
        return serve(open_leader)
    end_with_parent(signal.SIGKILL)
    run_follower(artifact, options)
    return 0

"""How a process ended, in words: a child, or a rank that its peers lost."""

from __future__ import annotations

import signal

GONE = "is gone or silent"  # what ranks report that failed because another one ended


def describe_exit(returncode: int) -> str:
    """``exit code 3``, or the name of the signal that ended the process (negative, as in subprocess)."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def rank_gone(error: RuntimeError) -> str:
    """What torch.distributed's error means for a rank; its first line says where it was noticed."""
    return f"another rank {GONE} ({str(error).splitlines()[0]})"

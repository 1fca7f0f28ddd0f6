"""How a child process ended, in words."""

from __future__ import annotations

import signal


def describe_exit(returncode: int) -> str:
    """``exit code 3``, or the name of the signal that ended the process (subprocess gives it as a negative number)."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"

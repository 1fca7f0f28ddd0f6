"""How many files and connections this process may have open."""

from __future__ import annotations

import resource
from contextlib import suppress

ENOUGH = 4096  # connections that a server may have to hold, with room for its own files


def open_file_limits() -> tuple[int, int]:
    """The soft limit, which holds, and the hard one, up to which it may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    return (1 << 31 if soft == unlimited else soft), (1 << 31 if hard == unlimited else hard)


def raise_open_files() -> str | None:
    """Raise the soft limit to ENOUGH, or as far as it goes; a sentence if that is too little."""
    soft, hard = open_file_limits()
    if soft < ENOUGH:
        raw_hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(ENOUGH, hard), raw_hard))
    now = open_file_limits()[0]
    if now >= ENOUGH:
        return None
    return f"only {now} files and connections may be open at once: more clients than that wait (ulimit -n {ENOUGH})"

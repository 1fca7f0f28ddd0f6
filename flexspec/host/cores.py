"""What this host lets the process use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may run on: a container or ``taskset`` may give it fewer than the host has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""What this host lets the process use."""

from __future__ import annotations

import math
import os

from flexspec.host.control_group import cpu_quota


def usable_cores() -> int:
    """Cores for this process, at least 1: as many as it may run on (``taskset``), and no more than the whole cores of
    time that its control group has. Threads beyond the quota would wait for each other while they are throttled.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota)))

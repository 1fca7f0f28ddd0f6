"""The one place that says where flexspec caches what it can rebuild: kernels, unpacked artifacts."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """$FLEXSPEC_CACHE, else flexspec's folder in $XDG_CACHE_HOME, else ~/.cache/flexspec. It need not exist yet."""
    chosen = os.environ.get("FLEXSPEC_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flexspec"

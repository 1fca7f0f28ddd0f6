"""How long-running work reports its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # (what is done, steps done, steps in total); called often, must be fast

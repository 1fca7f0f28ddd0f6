"""Integer arithmetic that Python has no name for."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up, exact for integers of any size; ``b`` is not 0."""
    return -(-a // b)

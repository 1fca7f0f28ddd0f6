"""Slots of KV cache: what a request may need, in tokens and pages. The one place that knows this sum.

Search, scheduler, KV pools and the check of the context all call it: where each does its own sum, one forgets the tree
and a server overruns its cache.
"""

from __future__ import annotations

from flexspec.arithmetic import ceil_div
from flexspec.types import PAGE_TOKENS

STEP_ROWS = 256  # rows of a step, if its trees have no more: prompts are fed in pieces of so many


def request_slots(tokens: int, tree_nodes: int) -> int:
    """Slots of a request of ``tokens`` committed tokens: they, then a tree of ``tree_nodes`` and its root."""
    return tokens + tree_nodes + 1


def longest_request(pages: int, tree_nodes: int) -> int:
    """Most committed tokens of a request that has ``pages`` pages; below 0 a tree alone does not fit."""
    return pages * PAGE_TOKENS - request_slots(0, tree_nodes)


def pages_of(slots: int) -> int:
    """Whole pages that hold these slots."""
    return ceil_div(slots, PAGE_TOKENS)

"""Slots of KV cache: what a request may need, in tokens and pages. The only place that computes this sum.

Search, scheduler, KV pools and the context check all call it: if each computed its own sum, one would omit the tree
and the server would overrun its cache.
"""

from __future__ import annotations

from flexspec.arithmetic import ceil_div
from flexspec.types import PAGE_TOKENS

STEP_ROWS = 256  # rows of a step, unless its trees have more: prompts are fed in chunks of this size


def request_slots(tokens: int, tree_nodes: int) -> int:
    """Slots of a request: its committed ``tokens``, then a tree of ``tree_nodes`` and its root."""
    return tokens + tree_nodes + 1


def longest_request(pages: int, tree_nodes: int) -> int:
    """The most committed tokens of a request with ``pages`` pages; negative if not even a tree fits."""
    return pages * PAGE_TOKENS - request_slots(0, tree_nodes)


def pages_of(slots: int) -> int:
    """The number of pages that hold these slots."""
    return ceil_div(slots, PAGE_TOKENS)

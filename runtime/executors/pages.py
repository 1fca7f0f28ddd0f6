"""Free pages of a KV pool, and the packing of ragged rows into a step.

Owns which pages are free and how ragged rows of several requests become one StepBatch. Each model has a pool and an
allocator of its own: the LLM and an SSM share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexspec.kv_slots import pages_of
from flexspec.runtime.executors.step import StepBatch
from flexspec.tree import bit_words


class PageAllocator:
    """Free pages of one pool; every page has one owner at most."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def grow(self, pages: list[int], slots: int) -> bool:
        """Extend ``pages`` until they cover ``slots`` cache slots; False, without change, when the pool is short."""
        missing = pages_of(slots) - len(pages)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            pages.append(self._free.pop())
        return True

    def release(self, pages: list[int]) -> None:
        """Free all of ``pages`` and empty the list."""
        self._free.extend(reversed(pages))
        pages.clear()


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One request's rows of a step."""

    ids: Sequence[int]
    positions: Sequence[int]
    context: int  # committed tokens in the cache
    pages: Sequence[int]
    logit_rows: Sequence[int]  # local to the group
    bits: Sequence[int] | None = None  # ancestor-or-self bits, local to the group; None: a causal chain
    features: Sequence[NDArray[np.float32]] | None = None  # a row for each id; None for a model that reads none


def pack_rows(groups: Sequence[RowGroup]) -> StepBatch:
    """One StepBatch of all groups, in order. It has at least one logit row: a step without any is meaningless."""
    starts = np.zeros(len(groups) + 1, np.int32)
    np.cumsum([len(group.ids) for group in groups], out=starts[1:])
    page_table = np.zeros((len(groups), max(len(group.pages) for group in groups)), np.int32)
    longest = max([len(group.ids) for group in groups if group.bits is not None], default=1)
    ancestors = np.zeros((int(starts[-1]), (longest + 63) // 64), np.uint64)
    for r, group in enumerate(groups):
        page_table[r, : len(group.pages)] = group.pages
        if group.bits is not None:
            ancestors[starts[r] : starts[r + 1]] = bit_words(group.bits, ancestors.shape[1])
    logit_rows = [int(starts[r]) + j for r, group in enumerate(groups) for j in group.logit_rows]
    rows_features = [row for group in groups for row in group.features or ()]
    return StepBatch(
        ids_T=np.array([token for group in groups for token in group.ids], np.int32),
        positions_T=np.array([position for group in groups for position in group.positions], np.int32),
        starts_R1=starts,
        contexts_R=np.array([group.context for group in groups], np.int32),
        causal_R=np.array([group.bits is None for group in groups], np.uint8),
        page_table_RB=page_table,
        ancestors_TW=ancestors,
        logit_rows_L=np.array(logit_rows or [int(starts[-1]) - 1], np.int32),
        features_TE=np.stack(rows_features).astype(np.float32, copy=False) if rows_features else None,
    )

"""Page allocation and the packing of ragged rows."""

from __future__ import annotations

import numpy as np
import pytest

from flexspec.runtime.executors.pages import PageAllocator, RowGroup, pack_rows
from flexspec.tree import TokenTree
from flexspec.types import PAGE_TOKENS


def test_pages_have_one_owner_and_come_back() -> None:
    pool = PageAllocator(4)
    first: list[int] = []
    second: list[int] = []
    assert pool.grow(first, PAGE_TOKENS) and len(first) == 1
    assert pool.grow(first, PAGE_TOKENS) and len(first) == 1, "covered already"
    assert pool.grow(first, PAGE_TOKENS + 1) and pool.grow(second, 2 * PAGE_TOKENS)
    assert sorted(first + second) == [0, 1, 2, 3] and pool.free_pages == 0
    assert not pool.grow(first, 4 * PAGE_TOKENS) and len(first) == 2, "all or nothing"
    assert pool.grow(first, 0)
    pool.release(second)
    assert second == [] and pool.free_pages == 2 and pool.grow(first, 4 * PAGE_TOKENS)
    assert sorted(first) == [0, 1, 2, 3]


def test_packing_keeps_each_requests_rows_together() -> None:
    tree = TokenTree((5, 6, 7, 8), (-1, 0, 0, 1))
    bits = [int(word) for word in tree.ancestors()[:, 0]]
    batch = pack_rows(
        [
            RowGroup([1, 2, 3], [10, 11, 12], 10, [4], [2]),
            RowGroup(tree.tokens, [40, 41, 41, 42], 40, [2, 9], range(4), bits=bits),
        ]
    )
    assert batch.ids_T.tolist() == [1, 2, 3, 5, 6, 7, 8] and batch.starts_R1.tolist() == [0, 3, 7]
    assert batch.causal_R.tolist() == [1, 0] and batch.contexts_R.tolist() == [10, 40]
    assert batch.page_table_RB.tolist() == [[4, 0], [2, 9]] and batch.logit_rows_L.tolist() == [2, 3, 4, 5, 6]
    assert np.array_equal(batch.ancestors_TW[3:], tree.ancestors())
    assert batch.slots().tolist() == [4 * 32 + 10, 4 * 32 + 11, 4 * 32 + 12, *(9 * 32 + 8 + j for j in range(4))]
    assert batch.features_TE is None
    arrays = [
        batch.ids_T,
        batch.positions_T,
        batch.starts_R1,
        batch.contexts_R,
        batch.page_table_RB,
        batch.logit_rows_L,
    ]
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
def test_wide_trees_take_as_many_ancestor_words_as_they_need(rows: int) -> None:
    tree = TokenTree(tuple(range(rows)), (-1, *[max(0, i - 3) for i in range(rows - 1)]))
    words = tree.ancestors()
    bits = [sum(int(word) << (64 * i) for i, word in enumerate(row)) for row in words]
    batch = pack_rows([RowGroup(tree.tokens, [0] * rows, 0, [0], [0], bits=bits)])
    assert np.array_equal(batch.ancestors_TW, words)


def test_features_are_packed_and_a_step_never_lacks_a_logit_row() -> None:
    features = [np.full(3, i, np.float32) for i in range(3)]
    groups = [
        RowGroup([1, 2], [0, 1], 0, [0], [], features=features[:2]),
        RowGroup([3], [7], 7, [1], [], features=features[2:]),
    ]
    batch = pack_rows(groups)
    assert batch.features_TE is not None and batch.features_TE.tolist() == [[i] * 3 for i in range(3)]
    assert batch.logit_rows_L.tolist() == [2]

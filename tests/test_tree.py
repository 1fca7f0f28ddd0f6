"""What follows from a token tree's parents: depths, ancestor bits, their words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexspec.tree import TokenTree, ancestor_bits, bit_words


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    size = draw(st.integers(1, 150))
    return TokenTree((0,) * size, (-1, *(draw(st.integers(0, i - 1)) for i in range(1, size))))


@given(trees())
def test_depths_and_bits_are_those_of_the_path_to_a_node(tree: TokenTree) -> None:
    table = tree.ancestors()
    for node in range(len(tree)):
        path = tree.path(node)
        assert tree.depths[node] == len(path) - 1
        assert [j for j in range(len(tree)) if int(table[node, j // 64]) >> j % 64 & 1] == path


def test_a_negative_parent_is_a_root_of_its_own() -> None:
    assert ancestor_bits([-1, 0, -1, 2, 1]) == [0b1, 0b11, 0b100, 0b1100, 0b10011]


def test_words_hold_64_bits_each_and_the_rest_is_zero() -> None:
    words = bit_words([1 << 63, 1 << 64 | 1], 3)
    assert words.dtype == np.uint64 and words.tolist() == [[1 << 63, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize("parents", [(-1, 1), (-1, -1), (-1, 0, 3, 0), (0, 0)])
def test_parents_come_before_their_children(parents: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        TokenTree((0,) * len(parents), parents)

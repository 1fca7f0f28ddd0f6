"""The generated top-k of logits rows against numpy's: order, ties, probabilities, rows that are not finite."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from step_models import on_cpu, tiny_llm

from flexspec.runtime.executors.step import Executor
from flexspec.runtime.executors.top_successors import top_successors


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    found = on_cpu(*tiny_llm())
    yield found
    found.close()


@pytest.mark.parametrize(("rows", "columns", "k"), [(1, 4096, 8), (5, 33, 4), (3, 16, 16), (2, 1, 1), (4, 17, 17)])
def test_like_numpy(executor: Executor, rows: int, columns: int, k: int) -> None:
    rng = np.random.default_rng(columns)
    logits = rng.normal(0.0, 4.0, (rows, columns)).astype(np.float32)
    index, chance = executor.top_successors(logits, k)
    expected_index, expected_chance = top_successors(logits, k)
    np.testing.assert_array_equal(index, expected_index)
    np.testing.assert_allclose(chance, expected_chance, rtol=1e-5)


def test_ties_go_to_the_lower_index(executor: Executor) -> None:
    logits = np.zeros((1, 40), np.float32)
    logits[0, [7, 30]] = 2.0
    index, chance = executor.top_successors(logits, 5)
    assert index.tolist() == [[7, 30, 0, 1, 2]]
    assert chance[0, 0] == chance[0, 1] > chance[0, 2] == chance[0, 4]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_has_no_chance(executor: Executor, bad: float) -> None:
    logits = np.ones((3, 40), np.float32)
    logits[1, 38] = bad
    _, chance = executor.top_successors(logits, 3)
    assert not chance[1].any()
    np.testing.assert_allclose(chance[[0, 2]], 1 / 40, rtol=1e-5)


def test_masked_logits(executor: Executor) -> None:
    logits = np.full((1, 20), -np.inf, np.float32)
    logits[0, 9] = 1.0
    index, chance = executor.top_successors(logits, 2)
    assert index[0, 0] == 9 and chance.tolist() == [[1.0, 0.0]]

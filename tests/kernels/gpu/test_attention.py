"""The generated attention kernels under Triton's interpreter, against float64, and what a row's bits depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from interpreted import interpreted

from flexspec.kernels.gpu.attention.check import (
    TOLERANCE,
    AttentionCase,
    RequestRows,
    bit_case,
    covering_cases,
    edge_cases,
    error_of,
    make_inputs,
    reference,
    same_bits,
    scale_of,
)
from flexspec.kernels.gpu.attention.launch import row_tiles
from flexspec.kernels.gpu.attention.variant import TileConfig
from flexspec.types import DType

pytestmark = pytest.mark.slow(reason="interprets kernels")

ONE_LOOP = tuple(replace(case, name=f"{case.name}, one loop") for case in edge_cases()[1:4])


def case_errors() -> dict[str, float]:
    from flexspec.kernels.gpu.launch import SourceKernels

    errors = {}
    for case in covering_cases() + edge_cases() + ONE_LOOP:
        config = TileConfig(32, 4, 2, two_loops=case not in ONE_LOOP)
        errors[case.label] = error_of(case, SourceKernels(case.variant(), config), "cpu")
    return errors


@pytest.fixture(scope="module")
def errors() -> Any:
    return interpreted(__file__, "case_errors")


@pytest.mark.parametrize("case", covering_cases() + edge_cases() + ONE_LOOP, ids=lambda case: case.label)
def test_kernels_agree_with_float64(case: AttentionCase, errors: dict[str, float]) -> None:
    assert errors[case.label] <= case.limit


def bits() -> dict[str, bool]:
    from flexspec.kernels.gpu.launch import SourceKernels

    return same_bits(bit_case(), SourceKernels(bit_case().variant(), TileConfig(32, 4, 2)), "cpu")


def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it() -> None:
    result = interpreted(__file__, "bits")
    assert len(result) == 17 and [name for name, same in result.items() if not same] == []


def test_reference_sees_one_wrong_bit_and_the_tolerance_is_far_below_it() -> None:
    case = AttentionCase("negative", 2, 1, 32, (RequestRows("tree", 5, 6),))
    inputs = make_inputs(case, 1, "cpu")
    flipped = inputs.ancestors_TW.copy()
    flipped[4, 0] ^= np.uint64(1)  # node 4 loses its root
    right, wrong = (reference(each, scale_of(case)) for each in (inputs, replace(inputs, ancestors_TW=flipped)))
    assert float((right - wrong)[4].abs().max()) > 100 * TOLERANCE[DType.F32]
    assert float((right - wrong)[:4].abs().max()) == 0.0


def test_row_tiles_cover_every_token_once_and_are_padded() -> None:
    tiles = row_tiles(np.array([0, 5, 6, 14], np.int32), 4, pad_to=7)
    assert tiles.tolist() == [[0, 0], [0, 4], [1, 0], [2, 0], [2, 4], [-1, 0], [-1, 0]]

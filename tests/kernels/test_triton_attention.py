"""The generated attention kernels under Triton's interpreter, against float64, and what a row's bits depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from interpreted import interpreted

from flexspec.kernels.attention_check import (
    TOLERANCE,
    Case,
    Part,
    StepInputs,
    covering_cases,
    edge_cases,
    error_of,
    make_inputs,
    reference,
    run_case,
    scale_of,
)
from flexspec.kernels.tree_attention import row_tiles
from flexspec.kernels.triton_spec import TileConfig
from flexspec.types import DType

ONE_LOOP = tuple(replace(case, name=f"{case.name}, one loop") for case in edge_cases()[1:4])
ROWS = Case("rows", 2, 1, 32, (Part("tree", 40, 9), Part("causal", 150, 3), Part("star", 64, 5)), split_keys=64)


def case_errors() -> dict[str, float]:
    from flexspec.kernels.triton_launch import SourceKernels

    errors = {}
    for case in covering_cases() + edge_cases() + ONE_LOOP:
        config = TileConfig(32, 4, 2, two_loops=case not in ONE_LOOP)
        errors[f"{case.name} {case.dtype.value}"] = error_of(case, SourceKernels(case.variant(), config), "cpu")
    return errors


@pytest.fixture(scope="module")
def errors() -> Any:
    return interpreted(__file__, "case_errors")


@pytest.mark.parametrize(
    "case", covering_cases() + edge_cases() + ONE_LOOP, ids=lambda case: f"{case.name} {case.dtype.value}"
)
def test_kernels_agree_with_float64(case: Case, errors: dict[str, float]) -> None:
    assert errors[f"{case.name} {case.dtype.value}"] <= TOLERANCE[case.dtype]


def _request_alone(inputs: StepInputs, request: int) -> StepInputs:
    """The step that holds only one of the requests, in the same cache."""
    first, last = inputs.starts_R1[request : request + 2].tolist()
    only = slice(request, request + 1)
    return replace(
        inputs, q_THD=inputs.q_THD[first:last].contiguous(), page_table_RB=inputs.page_table_RB[only],
        starts_R1=np.array([0, last - first], np.int32), contexts_R=inputs.contexts_R[only],
        causal_R=inputs.causal_R[only], ancestors_TW=inputs.ancestors_TW[first:last],
    )  # fmt: skip


def _first_rows(inputs: StepInputs, rows: int) -> StepInputs:
    """A step of one request cut to its first rows: the same tree before its last nodes were added."""
    return replace(
        inputs, q_THD=inputs.q_THD[:rows].contiguous(), starts_R1=np.array([0, rows], np.int32),
        ancestors_TW=inputs.ancestors_TW[:rows],
    )  # fmt: skip


def same_bits() -> dict[str, bool]:
    """Whether each request has the same output bits in the full step, alone, and with fewer rows behind a row."""
    import torch

    from flexspec.kernels.triton_launch import SourceKernels

    kernels = SourceKernels(ROWS.variant(), TileConfig(32, 4, 2))
    inputs = make_inputs(ROWS, 3, "cpu")
    together = run_case(ROWS, kernels, inputs, "cpu")
    same = {}
    for request in range(len(ROWS.parts)):
        first, last = inputs.starts_R1[request : request + 2].tolist()
        alone = _request_alone(inputs, request)
        out = run_case(ROWS, kernels, alone, "cpu")  # request 0 and 2 need fewer splits alone, 0 needs no merge
        same[f"request {request} alone"] = torch.equal(out, together[first:last])
        for rows in range(1, last - first):
            out = run_case(ROWS, kernels, _first_rows(alone, rows), "cpu")
            same[f"request {request}, {rows} rows"] = torch.equal(out, together[first : first + rows])
    return same


def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it() -> None:
    result = interpreted(__file__, "same_bits")
    assert len(result) == 17 and [name for name, same in result.items() if not same] == []


def test_reference_sees_one_wrong_bit_and_the_tolerance_is_far_below_it() -> None:
    case = Case("negative", 2, 1, 32, (Part("tree", 5, 6),))
    inputs = make_inputs(case, 1, "cpu")
    flipped = inputs.ancestors_TW.copy()
    flipped[4, 0] ^= np.uint64(1)  # node 4 loses its root
    right, wrong = (reference(each, scale_of(case)) for each in (inputs, replace(inputs, ancestors_TW=flipped)))
    assert float((right - wrong)[4].abs().max()) > 100 * TOLERANCE[DType.F32]
    assert float((right - wrong)[:4].abs().max()) == 0.0


def test_row_tiles_cover_every_token_once_and_are_padded() -> None:
    tiles = row_tiles(np.array([0, 5, 6, 14], np.int32), 4, pad_to=7)
    assert tiles.tolist() == [[0, 0], [0, 4], [1, 0], [2, 0], [2, 4], [-1, 0], [-1, 0]]

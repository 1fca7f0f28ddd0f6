"""Expressions of row-wise operators in C++: each operator's against its reference, and the functions that they call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flexspec.kernels.cpu.build import build_path, header_files, supported_isas
from flexspec.kernels.expression import record_expression
from flexspec.kernels.gpu.expression import FUNCTIONS
from flexspec.kernels.gpu.families.rowwise import RowwiseCase
from flexspec.ops.record import all_records, record_of
from flexspec.types import DType

SOURCE = """
#include "simd.h"
using namespace fs;
extern "C" void apply(const float* a, const float* b, float* y, int count) {
  for (int i = 0; i < count; i += 16) {
    vf x0 = load<vf>(a + i), x1 = load<vf>(b + i);
    (void)x1;
    store(y + i, EXPR);
  }
}
"""
ISAS = pytest.mark.parametrize("isa", supported_isas())
TINY, LARGEST = np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max


def apply(expr: str, isa: str, *operands: NDArray[np.float32]) -> NDArray[np.float32]:
    library = ctypes.CDLL(str(build_path(SOURCE.replace("EXPR", expr), isa)))
    count = len(operands[0])
    padded = [np.pad(x, (0, -count % 16)) for x in operands]
    y = np.empty_like(padded[0])
    library.apply(padded[0].ctypes, padded[-1].ctypes, y.ctypes, len(y))
    return y[:count]


@ISAS
@pytest.mark.parametrize("op", sorted(name for name, each in all_records().items() if each.kernel.cpu == "rowwise"))
def test_an_operator_agrees_with_its_reference(op: str, isa: str) -> None:
    import torch

    node = RowwiseCase(op, DType.F32).node()
    rng = np.random.default_rng(0)
    operands = [3 * rng.standard_normal(999).astype(np.float32) for _ in node.inputs]
    (expected,) = record_of(op).reference([torch.from_numpy(x).double() for x in operands], dict(node.attrs))
    np.testing.assert_allclose(apply(record_expression(node), isa, *operands), expected, rtol=1e-5, atol=1e-5)


@ISAS
@pytest.mark.parametrize(
    ("expr", "function", "low", "high"),
    [
        ("fs_exp(x0)", np.exp, -87.0, 88.0),
        ("fs_log(x0)", np.log, 1e-3, 1e3),
        ("fs_log(fs_exp(x0))", lambda x: x, 1.0, 88.0),
        ("fs_tanh(x0)", np.tanh, 0.5, 30.0),
    ],
)
def test_functions_are_right_to_a_few_places(
    expr: str, function: Callable[..., Any], low: float, high: float, isa: str
) -> None:
    x = np.linspace(low, high, 9999, dtype=np.float32)
    np.testing.assert_allclose(apply(expr, isa, x), function(x.astype(np.float64)), rtol=5e-7)


@ISAS
def test_the_logarithm_at_its_edges(isa: str) -> None:
    x = np.array([0.0, -0.0, -1.0, np.inf, -np.inf, np.nan, 1.0, TINY, 1e-40, LARGEST], np.float32)
    with np.errstate(all="ignore"):
        expected = np.log(x.astype(np.float64))
    np.testing.assert_allclose(apply("fs_log(x0)", isa, x), expected, rtol=5e-7)


@ISAS
@pytest.mark.parametrize("expr", ["vmin(x0, (2.0f))", "vmin((2.0f), x0)", "-vmax(-x0, -2.0f)", "-vmax(-2.0f, -x0)"])
def test_a_bound_may_be_a_number(expr: str, isa: str) -> None:
    x = np.arange(-4, 12, dtype=np.float32)
    np.testing.assert_array_equal(apply(expr, isa, x), np.minimum(x, 2.0))


def test_cpu_programs_have_every_function() -> None:
    header = header_files()["simd.h"].decode()
    assert [name for name in FUNCTIONS if f"inline vf {name}(" not in header] == []

"""Row-wise operators on Triton: the expression of the record translated, compiled, and right in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interpreted import interpreted

from flexspec.errors import CompileError
from flexspec.graph import Node
from flexspec.kernels.gpu.aot import compile_variants
from flexspec.kernels.gpu.expression import to_triton
from flexspec.kernels.gpu.families.rowwise import RowwiseCase, RowwiseVariant, check_cases, variant_of
from flexspec.kernels.gpu.package import package_kernels, read_packaged
from flexspec.ops import record
from flexspec.types import DType, Role, TensorType

pytestmark = pytest.mark.slow(reason="interprets kernels")

SWIGLU = "x0 / (1.0f + fs_exp(-x0)) * x1"


@pytest.mark.parametrize(
    ("expression", "translated"),
    [
        ("x0 + x1", "x0 + x1"),
        (SWIGLU, "x0 / (1.0 + tl.exp(-x0)) * x1"),
        ("(2.0f) * fs_tanh(x0 / (2.0f))", "(2.0) * tanh(x0 / (2.0))"),
        ("vmin(fs_log(1.0f + fs_exp(x0)), (2.0f))", "tl.minimum(tl.log(1.0 + tl.exp(x0)), (2.0))"),
        ("x0 > 0.0f ? x0 : x1 < 1e-3f ? -x1 : 3", "tl.where(x0 > 0.0, x0, tl.where(x1 < 1e-3, -x1, 3))"),
        ("vmin(vmax(x0, splat(-1.5f)), x1)", "tl.minimum(tl.maximum(x0, (-1.5)), x1)"),
        ("select(x0 >= x1, x0, x1) - --x0", "tl.where(x0 >= x1, x0, x1) - --x0"),
    ],
)
def test_an_expression_is_translated(expression: str, translated: str) -> None:
    assert to_triton(expression, 2) == translated


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("x0 + fs_cosh(x1)", "fs_cosh"),
        ("x0 + x2", "x2"),
        ("x0 % x1", "'% x1'"),
        ("(x0", "an early end"),
        ("x0 ? x1", "an early end"),
        ("x0 x1", "'x1'"),
        ("x0 < x1 < x0", "a second comparison '<'"),
        ("x0 + {bound}", "'{bound}'"),
        ("", "an early end"),
    ],
)
def test_what_has_no_translation_is_named(expression: str, found: str) -> None:
    with pytest.raises(CompileError) as caught:
        RowwiseVariant("toy", expression, 2, DType.F32)
    assert caught.value.found.startswith(f"{found} in the expression")


def tensor(text: str) -> TensorType:
    return TensorType(DType(text.split("[")[0]), ("T", int(text.split(",")[1][:-1])), Role.ACTIVATION)


@pytest.mark.parametrize("second", ["f32[T,8]", "bf16[T,16]"])
def test_operands_of_unlike_types_are_refused(second: str) -> None:
    node = Node("add", ("a", "b"), ())
    with pytest.raises(CompileError, match="operands of one type"):
        variant_of(node, {"a": tensor("bf16[T,8]"), "b": tensor(second)}, 1)


def test_integers_are_refused() -> None:
    with pytest.raises(CompileError, match="f32, f16 or bf16"):
        RowwiseVariant("add", "x0 + x1", 2, DType.I32)


def test_attributes_make_another_variant() -> None:
    first, second = (RowwiseVariant("cap", f"x0 * ({bound}f)", 1, DType.F32) for bound in (30.0, 50.0))
    assert first.name != second.name and first.name.rsplit("_", 2)[0] == "rowwise_cap"


CAP = record.OpRecord(
    name="capped", doc="bound * tanh(x / bound), at least `least`.", arity=(1, 1), shape=lambda types, attrs: types,
    flops=lambda *_: 0, bytes=lambda *_: 0, layouts=(),
    reference=lambda inputs, attrs: ((attrs["bound"] * (inputs[0] / attrs["bound"]).tanh()).clamp(max=attrs["most"]),),
    kernel=record.KernelKey("rowwise", "rowwise", "vmin({bound} * fs_tanh(x0 / {bound}), splat({most}))"),
    attrs={"bound": float, "most": int},
)  # fmt: skip


def errors() -> dict[str, float]:
    """Of every case in the interpreter, of every dtype; and of an operator whose expression is wrong."""
    from flexspec.kernels.gpu.families.rowwise import FAMILY, launch
    from flexspec.kernels.gpu.launch import SourceKernels

    record.all_records()
    record._RECORDS["capped"] = CAP
    cases = [*check_cases(interpreted=False), RowwiseCase("add", DType.F32, 1), RowwiseCase("add", DType.F32, 1024)]
    found = {
        f"{case.label} {case.elements}": case.error(SourceKernels(case.variant(), FAMILY.plain_config), "cpu")
        for case in cases
    }
    wrong = replace(record._RECORDS["add"], kernel=record.KernelKey("rowwise", "rowwise", "x0 - x1"))
    record._RECORDS["add"] = wrong
    case = RowwiseCase("add", DType.F32)
    found["wrong"] = case.error(SourceKernels(case.variant(), FAMILY.plain_config), "cpu")
    return found | _near_zero(launch, FAMILY.plain_config)


def _near_zero(launch: Any, config: Any) -> dict[str, float]:
    """tanh of small numbers, as a share of them, and operands that are views at odd addresses."""
    import torch

    from flexspec.kernels.gpu.launch import SourceKernels

    kernels = SourceKernels(RowwiseVariant("tanh", "fs_tanh(x0)", 1, DType.F32), config)
    x = torch.logspace(-6, 2, 99)
    odd = torch.arange(12.0).reshape(3, 4)[1:, 1:]
    added = launch(SourceKernels(RowwiseVariant("add", "x0 + x1", 2, DType.F32), config), [odd, odd])
    return {
        "tanh": float(((launch(kernels, [x]).double() - x.double().tanh()) / x.double().tanh()).abs().max()),
        "views": float((added - 2 * odd).abs().max()) + (added.shape != odd.shape),
        "empty": float(launch(kernels, [x[:0]]).numel()),
    }


@pytest.fixture(scope="module")
def interpreted_errors() -> Any:
    return interpreted(__file__, "errors")


@pytest.mark.parametrize("op", [*sorted({case.op for case in check_cases(interpreted=True)}), "capped"])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
def test_kernels_agree_with_the_reference_in_float64(interpreted_errors: Any, op: str, dtype: DType) -> None:
    case = RowwiseCase(op, dtype)
    assert interpreted_errors[f"{case.label} {case.elements}"] <= case.limit


@pytest.mark.parametrize(
    ("name", "limit"), [("add f32 1", 0), ("add f32 1024", 1e-6), ("tanh", 1e-6), ("views", 0), ("empty", 0)]
)
def test_edges(interpreted_errors: Any, name: str, limit: float) -> None:
    assert interpreted_errors[name] <= limit


def test_the_check_sees_a_wrong_expression(interpreted_errors: Any) -> None:
    assert interpreted_errors["wrong"] > 1.0


def test_binaries_fit_and_are_read_back_from_the_package(tmp_path: Path) -> None:
    variants = [RowwiseVariant("swiglu", SWIGLU, 2, DType.BF16), RowwiseVariant("cap", "fs_tanh(x0)", 1, DType.F32)]
    targets = ["sm_90", "gfx942"]
    compiled = compile_variants(variants, targets)
    assert [list(each.kernels) for each in compiled] == 4 * [["rowwise"]] and all(each.fits() for each in compiled)
    meta = compiled[0].kernels["rowwise"].meta
    assert meta["params"] == [["p0", "*bf16"], ["p1", "*bf16"], ["out", "*bf16"], ["elements", "i32"]]
    rows = package_kernels(variants, targets, tmp_path)
    assert [row["kernel"] for row in rows] == 4 * ["rowwise"]
    read = lambda path: (tmp_path / path).read_bytes()  # noqa: E731
    assert [read_packaged(each.variant, each.target.name, read) for each in compiled] == list(compiled)

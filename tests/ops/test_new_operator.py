"""An operator is one file: a file dropped into flexspec/ops works in builder, verifier, text, passes and reference."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from interpreted import interpreted
from step_models import chain_rows, on_cpu, random_weights

import flexspec.ops
from flexspec.builder import GraphBuilder
from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.errors import CompileError, GraphError
from flexspec.graph import Graph
from flexspec.kernels.cpu.render import render
from flexspec.kernels.gpu.family import kernel_variants
from flexspec.kernels.reference import run_graph
from flexspec.ops import record
from flexspec.runtime.executors.pages import pack_rows
from flexspec.runtime.executors.triton import TritonExecutor
from flexspec.runtime.executors.triton_device import INTERPRETER
from flexspec.text import parse_graph, print_graph
from flexspec.types import DType
from flexspec.verifier import verify

NEW_OPERATOR = '''
"""soft_cap: bound * tanh(x / bound), as Gemma 2 caps its logits."""

from flexspec.ops.checks import activation, require
from flexspec.ops.elementwise import flops_per_element
from flexspec.ops.record import KernelKey, OpRecord, TpLayout, io_bytes, register


def _shape(types, attrs):
    require(types[0].dtype.is_float, "soft_cap", types, "a floating tensor")
    return (activation(types[0], types[0].dims),)


def _reference(inputs, attrs):
    return (attrs["bound"] * (inputs[0] / attrs["bound"]).tanh(),)


register(
    OpRecord(
        name="soft_cap", doc="bound * tanh(x / bound).", arity=(1, 1), shape=_shape, flops=flops_per_element(3),
        bytes=io_bytes, layouts=(TpLayout("replicated", (None,), (None,)), TpLayout("split", (1,), (1,))),
        reference=_reference,
        kernel=KernelKey(cpu="rowwise", triton="rowwise", expr="{bound} * fs_tanh(x0 / {bound})"),
        attrs={"bound": float},
    )
)
'''


@pytest.fixture
def soft_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "soft_cap.py").write_text(NEW_OPERATOR)
    known = dict(record.all_records())
    monkeypatch.setattr(flexspec.ops, "__path__", [*flexspec.ops.__path__, str(tmp_path)])
    monkeypatch.setattr(record, "_RECORDS", known)
    monkeypatch.setitem(sys.modules, "flexspec.ops.soft_cap", None)  # so that the teardown forgets the module
    del sys.modules["flexspec.ops.soft_cap"]


@pytest.mark.usefixtures("soft_cap")
def test_new_operator_file_is_enough() -> None:
    b = GraphBuilder("capped", DType.F32)
    x = b.input("x", ("T", 8))
    (y,) = b.call("soft_cap", (b.linear(x, b.weight("w", (8, 8))),), {"bound": 30.0}, names=("y",))
    graph = b.finish(y)
    assert "soft_cap(%linear_0) {bound=30.0}" in print_graph(graph)
    assert parse_graph(print_graph(graph)) == graph
    verify(run_passes(graph, LLM_PASSES))
    found = run_graph(graph, {"x": 100 * torch.eye(8)[:3], "w": torch.eye(8)})["y"]
    torch.testing.assert_close(found, (100 * torch.eye(8)[:3] / 30).tanh() * 30)
    with pytest.raises(GraphError, match="no attribute bound"):
        b.call("soft_cap", (x,))


def test_without_the_file_the_operator_is_unknown() -> None:
    b = GraphBuilder("capped", DType.F32)
    with pytest.raises(GraphError, match="unknown operator 'soft_cap'"):
        b.call("soft_cap", (b.input("x", ("T", 8)),), {"bound": 30.0})


def _capped_model(bound: float, *, on_logits: bool = False) -> Graph:
    """ids -> embedding -> (cap) -> linear, or with the cap behind the linear."""
    b = GraphBuilder("capped", DType.F32)
    step = b.step_inputs()
    x = b.embedding(step.ids_T, b.weight("embed", (40, 32)))
    if not on_logits:
        (x,) = b.call("soft_cap", (x,), {"bound": bound}, names=("capped",))
    y = b.linear(b.select_rows(x, step.logit_rows_L), b.weight("head", (40, 32)))
    if on_logits:
        (y,) = b.call("soft_cap", (y,), {"bound": bound}, names=("logits_LV",))
    return b.finish(y)


@pytest.mark.usefixtures("soft_cap")
@pytest.mark.parametrize("bound", [0.5, 2.0])
def test_cpu_uses_the_attributes_of_a_row_wise_operator(bound: float) -> None:
    """The same expression with two bounds: a value fixed in it would pass one of them at most."""
    graph = _capped_model(bound)
    weights = random_weights(graph, scale=1.0)
    executor = on_cpu(graph, weights, pages=1)
    ids = [3, 39, 0, 17]
    found = executor.step(pack_rows([chain_rows(ids, 0, [0])]), want_logits=True).logits_LV
    executor.close()
    capped = bound * np.tanh(weights["embed"][ids] / bound)
    assert found is not None
    np.testing.assert_allclose(found, capped @ weights["head"].T, atol=1e-4)


def capped_on_triton() -> dict[str, float]:
    """In Triton's interpreter: the largest error with each bound, from a file that was dropped in."""
    exec(NEW_OPERATOR, {})
    errors = {}
    for bound in (0.5, 2.0):
        graph = _capped_model(bound)
        weights = random_weights(graph, scale=1.0)
        ids = [3, 39, 0, 17]
        batch = pack_rows([chain_rows(ids, 0, [0])])
        logits = TritonExecutor(graph, weights, 1, 16, INTERPRETER).step(batch, want_logits=True).logits_LV
        assert logits is not None
        capped = bound * np.tanh(weights["embed"][ids] / bound)
        errors[str(bound)] = float(np.abs(logits - capped @ weights["head"].T).max())
    return errors


@pytest.mark.slow(reason="interprets a kernel")
@pytest.mark.usefixtures("soft_cap")
def test_triton_uses_the_attributes_of_a_row_wise_operator() -> None:
    variants = [*kernel_variants(_capped_model(0.5), 1).values(), *kernel_variants(_capped_model(2.0), 1).values()]
    assert [variant.name.rsplit("_", 2)[0] for variant in variants] == 2 * ["rowwise_soft_cap"]
    assert variants[0].name != variants[1].name
    errors = interpreted(__file__, "capped_on_triton")
    assert list(errors) == ["0.5", "2.0"] and max(errors.values()) < 1e-4


@pytest.mark.usefixtures("soft_cap")
def test_an_expression_that_leaves_out_an_attribute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _capped_model(2.0)
    fixed = replace(record.record_of("soft_cap"), kernel=record.KernelKey("rowwise", expr="30.0f * fs_tanh(x0)"))
    monkeypatch.setitem(record._RECORDS, "soft_cap", fixed)
    with pytest.raises(CompileError, match="attribute bound=2.0, and its expr does not use it"):
        render(graph)


@pytest.mark.usefixtures("soft_cap")
def test_logits_behind_another_operator_are_refused() -> None:
    with pytest.raises(CompileError, match="comes from soft_cap"):
        render(_capped_model(30.0, on_logits=True))

"""An operator is one file: a file dropped into flexspec/ops works in builder, verifier, text, passes and reference."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import flexspec.ops
from flexspec.builder import GraphBuilder
from flexspec.compiler.pipeline import LLM_PASSES, run_passes
from flexspec.errors import GraphError
from flexspec.kernels.reference import run_graph
from flexspec.ops import record
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
        reference=_reference, kernel=KernelKey(cpu="rowwise", cpu_expr="30.0f * fs_tanh(x0 / 30.0f)"),
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

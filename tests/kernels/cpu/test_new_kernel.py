"""A CPU kernel is a template and a file of emitters: dropped in, they are found; programs include what they use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from step_models import chain_rows, on_cpu, random_weights, tiny_config

import flexspec.kernels.cpu.emitters as emitters
from flexspec.builder import GraphBuilder
from flexspec.graph import Graph
from flexspec.kernels.cpu.emitters.registry import kernel_emitters
from flexspec.kernels.cpu.render import render
from flexspec.models.registry import build_model
from flexspec.ops import record
from flexspec.ops.checks import activation
from flexspec.ops.elementwise import flops_per_element
from flexspec.ops.record import KernelKey, OpRecord, TpLayout, io_bytes
from flexspec.runtime.executors.pages import pack_rows
from flexspec.types import DType

TEMPLATE = """
#pragma once
namespace fs {
template <int K>
FS_KERNEL void reversed(const Ctx& c, int tid, int rows, Rows<float> x, Rows<float> y) {
  Range mine = share(rows, tid, c.team.size());
  for (int t = mine.lo; t < mine.hi; t++)
    for (int k = 0; k < K; k++) y.row(t)[k] = x.row(t)[K - 1 - k];
}
}  // namespace fs
"""
EMITTERS = """
from flexspec.kernels.cpu.places import row_count

HEADER = {header!r}


def reversed_columns(e, index, node):
    x = node.inputs[0]
    source = e.read(x, elem=False)
    out = e.rows(e.allocate(node.outputs[0].name, elem=False))
    e.call(f"reversed<{{e.columns(x)}}>(c, tid, {{row_count(e.graph, x)}}, {{source}}, {{out}})")


EMITTERS = {{"reversed": reversed_columns}}
"""
REVERSED = OpRecord(
    name="reversed", doc="The columns from last to first.", arity=(1, 1),
    shape=lambda types, attrs: (activation(types[0], types[0].dims),), flops=flops_per_element(1), bytes=io_bytes,
    layouts=(TpLayout("replicated", (None,), (None,)),), reference=lambda inputs, attrs: (inputs[0].flip(1),),
    kernel=KernelKey(cpu="reversed"),
)  # fmt: skip


@pytest.fixture
def reversed_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Its header; the files lie in a folder of their own."""
    header = tmp_path / "reversed.h"
    header.write_text(TEMPLATE)
    (tmp_path / "reversed_kernel.py").write_text(EMITTERS.format(header=str(header)))
    monkeypatch.setattr(emitters, "__path__", [*emitters.__path__, str(tmp_path)])
    monkeypatch.setattr(record, "_RECORDS", {**record.all_records(), "reversed": REVERSED})
    kernel_emitters.cache_clear()
    yield header
    kernel_emitters.cache_clear()
    sys.modules.pop("flexspec.kernels.cpu.emitters.reversed_kernel", None)


def model() -> Graph:
    b = GraphBuilder("toy", DType.F32)
    step = b.step_inputs()
    x = b.embedding(step.ids_T, b.weight("embed", (40, 33)))
    (y,) = b.call("reversed", (x,))
    return b.finish(b.linear(b.select_rows(y, step.logit_rows_L), b.weight("head", (40, 33))))


def test_a_kernel_that_was_dropped_in_runs(reversed_kernel: Path) -> None:
    graph, ids = model(), [3, 39, 0, 17]
    weights = random_weights(graph)
    executor = on_cpu(graph, weights, pages=1)
    logits = executor.step(pack_rows([chain_rows(ids, 0, [0])]), want_logits=True).logits_LV
    executor.close()
    assert logits is not None
    np.testing.assert_allclose(logits, weights["embed"][ids][:, ::-1] @ weights["head"].T, atol=1e-4)
    assert str(reversed_kernel) in render(graph).source
    assert str(reversed_kernel) not in render(build_model(tiny_config(), DType.F32)).source

"""Weight formats: what each record promises, how a graph carries them, and that what operators see does not change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from step_models import random_weights, tiny_config

from flexspec.builder import GraphBuilder
from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.errors import GraphError, GraphTextError, WeightError
from flexspec.models.registry import build_model
from flexspec.retype import store_kv, store_weights
from flexspec.text import parse_graph, print_graph
from flexspec.types import DType, Role, TensorType, WeightFormat
from flexspec.verifier import verify
from flexspec.weight_formats.bf16 import to_bf16_bits, widen_bf16
from flexspec.weight_formats.registry import encode_weight, stored_values, weight_formats

FORMATS = pytest.mark.parametrize("stored", weight_formats().values(), ids=lambda stored: stored.name)
F16 = weight_formats()["f16"]


@FORMATS
def test_a_stored_matrix_has_the_size_that_its_type_tells(stored: WeightFormat) -> None:
    rows = np.random.default_rng(0).standard_normal((6, 2 * stored.block_elements)).astype(np.float32)
    dtype = DType.F32 if stored.dtype is not DType.F32 else DType.BF16
    kind = TensorType(dtype, rows.shape, Role.WEIGHT, stored)
    assert stored.encode(rows).nbytes == kind.bytes({}) == 12 * stored.block_bytes


@FORMATS
def test_encoding_what_is_stored_gives_the_same_bytes(stored: WeightFormat) -> None:
    rows = np.random.default_rng(1).standard_normal((4, 4 * stored.block_elements)).astype(np.float32)
    once = stored.encode(rows)
    assert stored.encode(stored.decode(once)).tobytes() == once.tobytes()
    assert np.abs(stored.decode(once) - rows).max() < 0.1 * np.abs(rows).max()


@FORMATS
def test_bytes_of_zero_are_zeros(stored: WeightFormat) -> None:
    """Tiles are padded with them."""
    block = stored.encode(np.ones((1, stored.block_elements), np.float32))
    assert not stored.decode(np.zeros_like(block)).any()


@FORMATS
def test_rows_and_whole_blocks_are_stored_by_themselves(stored: WeightFormat) -> None:
    """What ranks rely on, who cut a weight before it is stored."""
    edge = stored.block_elements
    rows = np.random.default_rng(2).standard_normal((8, 3 * edge)).astype(np.float32)
    whole = stored.decode(stored.encode(rows))
    np.testing.assert_array_equal(stored.decode(stored.encode(rows[3:5])), whole[3:5])
    np.testing.assert_array_equal(stored.decode(stored.encode(rows[:, edge : 2 * edge])), whole[:, edge : 2 * edge])


def _numbers(stored: WeightFormat) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """All finite values of a format of one or two bytes an element; a sample of others."""
    sample = stored.encode(np.random.default_rng(3).standard_normal((64, 1024)).astype(np.float32))
    if stored.block_elements == 1 and stored.block_bytes <= 2:
        bits = np.arange(1 << 8 * stored.block_bytes).astype(f"u{stored.block_bytes}")
        sample = bits.view(sample.dtype)
    values = stored.decode(sample)
    return values[np.isfinite(values)]


@FORMATS
def test_a_dtype_is_exact_where_the_record_says_so(stored: WeightFormat) -> None:
    import torch

    numbers = torch.from_numpy(_numbers(stored))
    torch_dtypes = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}
    exact = {d for d, t in torch_dtypes.items() if torch.equal(numbers.to(t).float(), numbers)}
    assert exact >= set(stored.exact)
    if stored.block_elements == 1:  # a sample would do for float32 only; of the others all numbers were tried
        assert exact == set(stored.exact)


def test_bfloat16_rounds_to_nearest_even() -> None:
    import torch

    rng = np.random.default_rng(0)
    edges = np.array([0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -3.4e38, 1e-40, np.inf, -np.inf], np.float32)
    scales = np.float32(2) ** rng.uniform(-130, 127, 500)
    x = np.concatenate([edges, rng.standard_normal(1000), scales]).astype(np.float32)
    expected = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(widen_bf16(to_bf16_bits(x)), expected)


def test_a_value_out_of_range_names_its_weight() -> None:
    values = np.array([[1.0, -7e4]], np.float32)
    with pytest.raises(WeightError, match="weight layers.0.w has -70000.0, out of range for f16"):
        encode_weight("layers.0.w", F16, values)


def test_matrices_are_stored_otherwise_and_vectors_are_not() -> None:
    graph = build_model(tiny_config(qkv_bias=True), DType.BF16)
    stored = store_weights(graph, F16)
    for value in stored.inputs_of(Role.WEIGHT):
        assert value.type.stored == ("f16" if len(value.type.dims) > 1 else "bf16")
        assert value.type.dtype is DType.BF16
    assert stored.nodes == graph.nodes and stored.hash() != graph.hash()
    assert store_weights(stored, weight_formats()["bf16"]) == graph


def test_a_format_is_part_of_the_text_form() -> None:
    graph = store_weights(build_model(tiny_config(), DType.F32), F16)
    text = print_graph(graph)
    assert "input %embed_tokens.weight: f32[203,96]:weight:f16\n" in text
    assert parse_graph(text) == graph
    with pytest.raises(GraphTextError, match=f"one of {', '.join(weight_formats())}"):
        parse_graph(text.replace(":weight:f16", ":weight:q9"))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (TensorType(DType.F32, (4,), Role.WEIGHT, F16), "for weight matrices"),
        (TensorType(DType.F32, (4, 4), Role.ACTIVATION, F16), "for weight matrices"),
        (TensorType(DType.I32, (4, 4), Role.WEIGHT, F16), "of a floating-point dtype"),
        (TensorType(DType.F16, (4, 4), Role.WEIGHT, F16), "f16 is stored as f16"),
        (TensorType(DType.F32, (4, 33), Role.WEIGHT, replace(F16, block_elements=32)), "whole blocks of 32"),
    ],
)
def test_a_format_that_does_not_fit_its_type_is_refused(kind: TensorType, expected: str) -> None:
    b = GraphBuilder("g", DType.F32)
    graph = b.finish(b.linear(b.input("x", ("T", 8)), b.weight("w", (4, 8))))
    broken = replace(graph, inputs=(*graph.inputs, replace(graph.inputs[-1], name="bad", type=kind)))
    with pytest.raises(GraphError, match=expected):
        verify(broken)


def test_rows_of_broken_blocks_name_the_weight() -> None:
    graph = build_model(tiny_config(hidden_size=70), DType.F32)
    with pytest.raises(GraphError, match=r"weight embed_tokens.weight has rows of 70"):
        store_weights(graph, replace(F16, block_elements=32))


def test_products_of_matrices_that_are_stored_differently_are_not_fused() -> None:
    graph = build_model(tiny_config(layers=1), DType.F32)
    mixed = replace(
        graph,
        inputs=tuple(
            replace(v, type=replace(v.type, format=F16)) if "v_proj" in v.name or "up_proj" in v.name else v
            for v in graph.inputs
        ),
    )
    plain, apart = (run_passes(g, LLM_PASSES) for g in (graph, mixed))
    assert [n.op for n in plain.nodes].count("linear_swiglu") == 1
    assert [n.op for n in apart.nodes].count("linear_swiglu") == 0
    counts = [dict(n.attrs)["count"] for n in apart.nodes if n.op == "linear_group"]
    assert counts == [2]  # q and k


def test_caches_of_another_dtype_are_typed_and_counted() -> None:
    graph = build_model(tiny_config(layers=1), DType.BF16)
    wide = store_kv(graph, DType.F32)
    assert {v.type.dtype for v in wide.inputs_of(Role.KV)} == {DType.F32}
    assert {wide.types()[name].dtype for name in wide.outputs[1:]} == {DType.F32}
    assert wide.types()[wide.outputs[0]].dtype is DType.BF16
    kv = [sum(v.type.bytes({"P": 3}) for v in g.inputs_of(Role.KV)) for g in (graph, wide)]
    assert kv[1] == 2 * kv[0]


def test_operators_see_what_is_left_of_a_stored_weight() -> None:
    graph = store_weights(build_model(tiny_config(layers=1), DType.F32), F16)
    weights = random_weights(graph)
    for value in graph.inputs_of(Role.WEIGHT):
        array = weights[value.name]
        expected = array.astype(np.float16).astype(np.float32) if array.ndim > 1 else array
        np.testing.assert_array_equal(stored_values(value.name, value.type, array), expected)

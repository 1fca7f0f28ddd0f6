"""CPU programs that store weights in any format: the bits of a program whose weights were expanded at compile time."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from step_models import chain_rows, on_cpu, random_tree, random_weights, tiny_config, tree_rows

from flexspec.errors import CompileError
from flexspec.graph import Graph
from flexspec.kernels.cpu.build import supported_isas
from flexspec.kernels.cpu.render import render
from flexspec.kernels.cpu.weight_formats.registry import cpu_formats
from flexspec.models.registry import build_model
from flexspec.retype import store_kv, store_weights
from flexspec.runtime.executors.pages import pack_rows
from flexspec.types import DType, Role, WeightFormat
from flexspec.weight_formats.registry import stored_values, weight_formats

# Every product that reads a matrix, with sizes that fill no tile: a dense layer, one of experts, a tied head.
CONFIG = tiny_config(
    family="qwen3_moe", hidden_size=70, ffn_size=50, dense_layers=(0,), experts=3, experts_per_token=2,
    expert_ffn_size=40, qkv_bias=True,
)  # fmt: skip
BEST, *OTHERS = supported_isas()
CASES = [
    *(
        (stored, dtype, isa)
        for stored in weight_formats().values()
        for dtype in (DType.F32, DType.BF16)
        for isa in (BEST, *OTHERS)
        if stored.name not in ("f32", "bf16")
    ),
    (weight_formats()["bf16"], DType.F32, BEST),
    (weight_formats()["f32"], DType.BF16, BEST),
]


def steps(graph: Graph, weights: dict[str, NDArray[np.float32]]) -> bytes:
    """Logits of a token, a piece of a prompt and a tree."""
    executor = on_cpu(graph, weights, threads=2)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 203, 40).tolist()
    pages = [3, 1]
    groups = [
        chain_rows(ids[:1], 0, pages),
        chain_rows(ids[1:], 1, pages),
        tree_rows(random_tree(rng, 9, 203), 40, pages),
    ]
    results = [executor.step(pack_rows([group]), want_logits=True).logits_LV for group in groups]
    executor.close()
    return b"".join(logits.tobytes() for logits in results if logits is not None)


def expanded(graph: Graph, weights: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    return {v.name: stored_values(v.name, v.type, weights[v.name]) for v in graph.inputs_of(Role.WEIGHT)}


@pytest.mark.parametrize(
    ("stored", "dtype", "isa"), CASES, ids=[f"{stored.name}_in_{dtype.value}_{isa}" for stored, dtype, isa in CASES]
)
def test_a_stored_weight_gives_the_bits_of_an_expanded_one(
    monkeypatch: pytest.MonkeyPatch, stored: WeightFormat, dtype: DType, isa: str
) -> None:
    monkeypatch.setenv("FLEXSPEC_CPU_ISA", isa)
    plain = build_model(CONFIG, dtype)
    graph = store_weights(plain, stored)
    weights = random_weights(graph)
    weights["embed_tokens.weight"][:, 1] = 3e-6  # a subnormal of float16
    assert steps(graph, weights) == steps(plain, expanded(graph, weights))


def test_every_format_has_tiles() -> None:
    assert list(cpu_formats()) == list(weight_formats())


def test_a_format_without_tiles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = store_weights(build_model(tiny_config(), DType.F32), weight_formats()["f16"])
    table = {name: tiles for name, tiles in cpu_formats().items() if name != "f16"}
    monkeypatch.setattr("flexspec.kernels.cpu.weight_formats.registry.cpu_formats", lambda: table)
    with pytest.raises(CompileError, match=f"weights stored as f16.*: {', '.join(table)}\\."):
        render(graph)


def test_caches_of_another_dtype_are_refused() -> None:
    graph = store_kv(build_model(tiny_config(), DType.BF16), DType.F32)
    with pytest.raises(CompileError, match="weights of bf16 and KV of f32"):
        render(graph)

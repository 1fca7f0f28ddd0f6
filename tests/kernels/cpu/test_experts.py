"""Experts on the CPU: against the references, a row's bits alone and among others, and experts that nobody chose.

Legend: T rows, E hidden, F ffn, X experts, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from step_models import Weights, chain_rows, on_cpu, random_weights, tiny_config

from flexspec.builder import GraphBuilder
from flexspec.graph import Graph
from flexspec.kernels.cpu.build import supported_isas
from flexspec.models.registry import build_model
from flexspec.runtime.executors.cpu import CpuExecutor
from flexspec.runtime.executors.pages import RowGroup, pack_rows
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.types import DType, Role

# Sizes that are multiples of nothing: padding columns, half tiles, an odd number of ffn blocks, a half pair of columns.
CONFIG = tiny_config(
    family="mixtral", heads=3, kv_heads=1, hidden_size=84, vocab_size=211, layers=2, tied_embeddings=False,
    experts=7, experts_per_token=3, expert_ffn_size=36, normalize_routing=True,
)  # fmt: skip
ISAS = ("amx", "avx512", "avx2", "generic")
ROWS = (1, 5, 17, 64)
Pair = tuple[Graph, Weights, CpuExecutor, CpuExecutor]


def mlp_graph(dtype: DType, top_k: int, softmax: str, normalize: bool) -> Graph:
    """Embedding, one mixture and a head: nothing that hides an error of the experts."""
    b = GraphBuilder("experts", dtype)
    step = b.step_inputs()
    x = b.embedding(step.ids_T, b.weight("embed_tokens.weight", (211, 84)))
    routing = b.router(x, b.weight("gate.weight", (7, 84)), top_k, normalize=normalize, softmax=softmax)
    wide, narrow = (7, 36, 84), (7, 84, 36)
    y = b.moe_experts(x, routing, b.weight("g", wide), b.weight("u", wide), b.weight("d", narrow), top_k)
    rows = b.select_rows(y, step.logit_rows_L)
    return b.finish(b.linear(rows, b.weight("lm_head.weight", (211, 84)), name="logits_LV"))


@pytest.fixture(scope="module", params=[(isa, dtype) for isa in ISAS for dtype in ("bf16", "f32")], ids="-".join)
def models(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A whole model on one thread and on two."""
    isa, dtype = request.param
    if isa not in supported_isas():
        pytest.skip(f"this CPU has no {isa}")
    graph = build_model(CONFIG, DType(dtype))
    weights = random_weights(graph, scale=0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXSPEC_CPU_ISA", isa)
        pair = on_cpu(graph, weights), on_cpu(graph, weights, threads=2)
    yield (graph, weights, *pair)
    for executor in pair:
        executor.close()


def ids_of(count: int, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, CONFIG.vocab_size, count)]


def logits(executor: CpuExecutor | ReferenceExecutor, *groups: RowGroup) -> NDArray[np.float32]:
    result = executor.step(pack_rows(groups), want_logits=True)
    assert result.logits_LV is not None and np.isfinite(result.logits_LV).all()
    return result.logits_LV


@pytest.mark.parametrize("rows", ROWS)
def test_a_program_computes_what_the_references_do(models: Pair, rows: int) -> None:
    """bfloat16 may choose other experts where two are close, so that only most rows are near."""
    graph, weights, *executors = models
    exact = ReferenceExecutor(build_model(CONFIG, DType.F32), weights, pages=16, max_rows=96)
    prompt = chain_rows(ids_of(rows, seed=rows), 0, [3, 1, 2])
    wanted = logits(exact, prompt)
    for executor in executors:
        off = np.abs(logits(executor, prompt) - wanted).max(-1) / np.abs(wanted).max()
        if graph.inputs_of(Role.WEIGHT)[0].type.dtype is DType.F32:
            assert off.max() < 5e-5
        else:
            assert np.median(off) < 0.03


@pytest.mark.parametrize("company", [1, 4, 16, 63])
def test_a_row_has_the_same_bits_alone_and_in_company(models: Pair, company: int) -> None:
    *_, first, second = models
    wanted = logits(first, chain_rows([7], 0, [5]))
    others = chain_rows(ids_of(company, seed=company), 0, [0, 2, 4])
    for executor in (first, second):
        np.testing.assert_array_equal(logits(executor, others, chain_rows([7], 0, [5]))[-1:], wanted)
        np.testing.assert_array_equal(logits(executor, chain_rows([7], 0, [5]), others)[:1], wanted)


def test_prompt_pieces_and_threads_give_the_same_bits(models: Pair) -> None:
    *_, first, second = models
    ids = ids_of(64)
    whole = logits(first, chain_rows(ids, 0, [3, 1]))
    np.testing.assert_array_equal(logits(second, chain_rows(ids, 0, [3, 1])), whole)
    for sizes in ([1] * 64, [17, 5, 1, 33, 8]):
        start, pieces = 0, []
        for size in sizes:
            pieces.append(logits(second, chain_rows(ids[start : start + size], start, [0, 2])))
            start += size
        np.testing.assert_array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize(
    ("top_k", "softmax", "normalize"), [(1, "all", False), (2, "all", True), (3, "chosen", False), (7, "all", False)]
)
def test_every_kind_of_routing(top_k: int, softmax: str, normalize: bool) -> None:
    """And experts that nobody chose: one whose scores are the lowest for every row, by its weights."""
    graph = mlp_graph(DType.F32, top_k, softmax, normalize)
    weights = dict(random_weights(graph, scale=0.3))
    embedding = weights["embed_tokens.weight"]
    embedding[:, 0], weights["gate.weight"][4] = 4.0, 0.0
    weights["gate.weight"][4, 0] = -40.0
    if top_k < 7:
        for name in ("g", "u", "d"):
            weights[name][4] = np.nan  # read, it would show
    executor = on_cpu(graph, weights, threads=2)
    exact = ReferenceExecutor(graph, weights, pages=16, max_rows=96)
    for rows in ROWS:
        step = chain_rows(ids_of(rows), 0, [0, 1])
        np.testing.assert_allclose(logits(executor, step), logits(exact, step), atol=1e-4, rtol=0)
    executor.close()


def test_of_equal_experts_the_first_is_taken() -> None:
    graph = mlp_graph(DType.F32, 2, "all", True)
    weights = dict(random_weights(graph, scale=0.3))
    weights["gate.weight"][:] = weights["gate.weight"][0]
    for name in ("g", "u", "d"):
        weights[name][2:] = np.nan
    executor = on_cpu(graph, weights)
    exact = ReferenceExecutor(graph, weights, pages=16, max_rows=96)
    step = chain_rows(ids_of(9), 0, [0])
    np.testing.assert_allclose(logits(executor, step), logits(exact, step), atol=1e-4, rtol=0)
    executor.close()


def test_what_is_not_a_number_is_not_lost_on_the_way() -> None:
    """A row with NaN scores still chooses experts, so that the result is known as broken instead of zero."""
    graph = mlp_graph(DType.F32, 2, "all", True)
    weights = dict(random_weights(graph, scale=0.3))
    weights["gate.weight"][:] = np.nan
    executor = on_cpu(graph, weights)
    assert (executor.step(pack_rows([chain_rows(ids_of(3), 0, [0])]), want_logits=True).argmax_L == -1).all()
    executor.close()

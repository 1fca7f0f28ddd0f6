"""The reference executor as an Executor: refusals, order of move_kv, bf16, features that a model reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexspec.builder import PAGE_TOKENS as BUILDER_PAGE_TOKENS
from flexspec.errors import EngineError, WeightError
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model, expected_weights
from flexspec.runtime.executors.step import Executor, StepBatch
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.types import PAGE_TOKENS, DType

CONFIG = ModelConfig("llama", 40, 32, 2, 4, 2, 8, 48, 1e-5, 64)


def random_weights(dtype: DType = DType.F32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = expected_weights(build_model(CONFIG, dtype))
    return {name: rng.normal(len(s) == 1, 0.25, s).astype(np.float32) for name, s in shapes.items()}


def executor_of(dtype: DType = DType.F32) -> ReferenceExecutor:
    return ReferenceExecutor(build_model(CONFIG, dtype), random_weights(), pages=4, max_rows=8)


def chain(tokens: list[int], context: int = 0, wanted: list[int] | None = None) -> StepBatch:
    n = len(tokens)
    rows = list(range(n)) if wanted is None else wanted
    return StepBatch(
        ids_T=np.array(tokens, np.int32), positions_T=np.arange(context, context + n, dtype=np.int32),
        starts_R1=np.array([0, n], np.int32), contexts_R=np.array([context], np.int32),
        causal_R=np.ones(1, np.uint8), page_table_RB=np.array([[2, 3]], np.int32),
        ancestors_TW=np.zeros((n, 1), np.uint64), logit_rows_L=np.array(rows, np.int32),
    )  # fmt: skip


def test_it_is_an_executor() -> None:
    executor: Executor = executor_of()
    assert (executor.vocab_size, executor.max_rows, executor.pages, executor.max_positions) == (40, 8, 4, 64)
    assert BUILDER_PAGE_TOKENS == PAGE_TOKENS


def test_chunked_prefill_equals_whole() -> None:
    whole = executor_of().step(chain([1, 2, 3, 4, 5, 6]), want_logits=True)
    parts = executor_of()
    parts.step(chain([1, 2]), want_logits=False)
    rest = parts.step(chain([3, 4, 5, 6], context=2), want_logits=True)
    np.testing.assert_allclose(rest.logits_LV, whole.logits_LV[2:], rtol=0, atol=1e-5)


def test_only_wanted_rows_have_logits() -> None:
    every = executor_of().step(chain([1, 2, 3]), want_logits=True)
    some = executor_of().step(chain([1, 2, 3], wanted=[2, 0]), want_logits=True)
    np.testing.assert_allclose(some.logits_LV, every.logits_LV[[2, 0]], rtol=0, atol=1e-5)
    quiet = executor_of().step(chain([1, 2, 3], wanted=[2]), want_logits=False)
    assert quiet.logits_LV is None and quiet.features_TE is None
    assert quiet.argmax_L.dtype == np.int32 and quiet.argmax_L[0] == every.argmax_L[2]


def test_move_kv_goes_in_order() -> None:
    """dst <= src ascending: slot 1 is read before it is written over, and written before slot 3 is read."""
    executor = executor_of()
    batch = chain([1, 2, 3, 4])
    executor.step(batch, want_logits=False)
    slots = batch.slots()
    before = executor.read_kv(slots)
    executor.move_kv(slots[[1, 3]], slots[[0, 1]])
    for name, after in executor.read_kv(slots).items():
        np.testing.assert_array_equal(after, before[name][[1, 3, 2, 3]], err_msg=name)


def test_bf16_is_near_float32() -> None:
    wide = executor_of().step(chain([1, 2, 3]), want_logits=True).logits_LV
    half = executor_of(DType.BF16).step(chain([1, 2, 3]), want_logits=True).logits_LV
    assert half.dtype == np.float32
    assert 0 < np.abs(half - wide).max() < 0.05 * np.abs(wide).max()


def test_missing_and_misshapen_weights_are_named() -> None:
    graph, weights = build_model(CONFIG, DType.F32), random_weights()
    with pytest.raises(WeightError, match="no weight layers.1.mlp.up_proj.weight"):
        ReferenceExecutor(graph, {k: v for k, v in weights.items() if k != "layers.1.mlp.up_proj.weight"}, 4, 8)
    with pytest.raises(WeightError, match=r"weight norm.weight of shape \[31\]"):
        ReferenceExecutor(graph, weights | {"norm.weight": np.ones(31, np.float32)}, 4, 8)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (chain(list(range(9))), "a step of 9 rows"),
        (chain([1, 2], context=63), "a step of 2 rows up to position 64; expected 1 to 8 rows below position 64"),
        (chain([40]), "token ids from 40 to 40; expected ids from 0 to 39"),
        (chain([-1]), "token ids from -1"),
    ],
)
def test_what_lies_beyond_a_table_is_refused(batch: StepBatch, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        executor_of().step(batch, want_logits=False)


def test_missing_features_are_our_bug() -> None:
    graph = build_model(replace(CONFIG, family="fused_state"), DType.F32, reduced_vocab_size=20)
    weights = {name: np.ones(dims, np.float32) for name, dims in expected_weights(graph).items()}
    with pytest.raises(AssertionError, match="reads features"):
        ReferenceExecutor(graph, weights, 4, 8).step(chain([1]), want_logits=False)

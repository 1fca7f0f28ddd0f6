"""Target laws against a plain float64 definition, against Hugging Face's processors, and at every edge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexspec.errors import EngineError
from flexspec.runtime.acceptance.transforms import target_law
from flexspec.sampling import SamplingParams


def plain_law(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The definition, one step a line, with full sorts."""
    if params.greedy:
        return np.eye(len(logits))[int(logits.argmax())]
    scaled = logits.astype(np.float64) / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled[scaled < np.sort(scaled)[-params.top_k]] = -np.inf
    law = np.exp(scaled - scaled.max())
    law /= law.sum()
    if params.top_p < 1.0:
        order = np.argsort(-law, kind="stable")
        above = np.concatenate([[0.0], law[order].cumsum()[:-1]])
        law[order[above >= params.top_p]] = 0.0
        law /= law.sum()
    if params.min_p > 0.0:
        law[law < params.min_p * law.max()] = 0.0
        law /= law.sum()
    return law


def some_logits(seed: int, size: int, spread: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, spread, size).astype(np.float32)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 400), st.sampled_from([0.1, 1.0, 5.0]),
    st.sampled_from([0.05, 0.7, 1.0, 2.0]), st.sampled_from([0, 1, 2, 7, 50, 10_000]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)  # fmt: skip
def test_equals_the_definition(seed, size, spread, temperature, top_k, top_p, min_p) -> None:
    logits = some_logits(seed, size, spread)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    law = target_law(logits, params)
    assert law.dtype == np.float64 and law.sum() == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(law, plain_law(logits, params), rtol=1e-9, atol=1e-13)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.sampled_from([0, 2, 5]),
    st.sampled_from([0.0, 0.3, 0.8, 1.0]), st.sampled_from([0.0, 0.3, 1.0]),
)  # fmt: skip
def test_ties(values, top_k, top_p, min_p) -> None:
    logits = np.array(values, np.float32)
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    law = target_law(logits, params)
    assert law.sum() == pytest.approx(1.0, abs=1e-12)
    kept = law > 0.0
    for value in set(values):
        same = kept[logits == value]
        # Top-k and min-p treat ties alike; the nucleus may end inside a tie, and then keeps the lower ids.
        assert same.all() or not same.any() or (top_p < 1.0 and (np.diff(same.astype(int)) <= 0).all())
    if top_k and top_p == 1.0 and min_p == 0.0:
        assert kept.sum() >= min(top_k, len(values))


def test_ties_at_the_edges_exactly() -> None:
    logits = np.array([1, 2, 2, 2, 0], np.float32)
    assert (target_law(logits, SamplingParams(temperature=1.0, top_k=2)) > 0).tolist() == [0, 1, 1, 1, 0]
    assert (target_law(logits, SamplingParams(temperature=1.0, top_p=0.3)) > 0).tolist() == [0, 1, 1, 0, 0]
    assert (target_law(logits, SamplingParams(temperature=1.0, top_p=0.2)) > 0).tolist() == [0, 1, 0, 0, 0]
    assert (target_law(logits, SamplingParams(temperature=1.0, min_p=1.0)) > 0).tolist() == [0, 1, 1, 1, 0]
    assert target_law(logits, SamplingParams(temperature=1.0, top_k=1)).tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0), SamplingParams(temperature=1e-6), SamplingParams(temperature=1.0, top_p=0.0),
        SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=1e-5), SamplingParams(temperature=1e-4),
    ],
)  # fmt: skip
def test_limits_that_mean_greedy(params) -> None:
    logits = some_logits(3, 1000, 4.0)
    assert target_law(logits, params).tolist() == np.eye(1000)[logits.argmax()].tolist()


def test_banned_tokens_and_huge_numbers() -> None:
    logits = np.array([-np.inf, 3e38, -3e38, 3e38, -np.inf], np.float32)
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=4, top_p=0.99, min_p=0.01)):
        assert target_law(logits, params).tolist() == [0.0, 0.5, 0.0, 0.5, 0.0]
    alone = np.array([-np.inf, 1.0, -np.inf], np.float32)
    assert target_law(alone, SamplingParams(temperature=2.0, top_k=2)).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [1.0, np.inf], [-np.inf, -np.inf], [1.0, -np.nan]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(bad, temperature) -> None:
    with pytest.raises(EngineError, match="FS601"):
        target_law(np.array(bad, np.float32), SamplingParams(temperature=temperature))


def test_a_law_is_not_taken_for_logits() -> None:
    with pytest.raises(AssertionError, match="float32"):
        target_law(target_law(some_logits(1, 9, 1.0), SamplingParams(temperature=1.0)), SamplingParams(temperature=1.0))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=40),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=0.8, top_k=60, top_p=0.8, min_p=0.02),
    ],
)
def test_equals_hugging_faces_processors(params) -> None:
    torch = pytest.importorskip("torch")
    warpers = pytest.importorskip("transformers.generation.logits_process")
    logits = some_logits(11, 2000, 3.0)
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    chain = [warpers.TemperatureLogitsWarper(params.temperature)]
    chain += [warpers.TopKLogitsWarper(params.top_k)] if params.top_k else []
    chain += [warpers.TopPLogitsWarper(params.top_p)] if params.top_p < 1.0 else []
    chain += [warpers.MinPLogitsWarper(params.min_p)] if params.min_p else []
    for warper in chain:
        scores = warper(None, scores)
    np.testing.assert_allclose(target_law(logits, params), scores.softmax(-1)[0].numpy(), rtol=1e-9, atol=1e-15)

"""Tiny models, prompts and plans of the engine's tests, and what plain decoding makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from engine_runs import Answer, make_engine
from step_models import tiny_config

from flexspec.runtime.executors.step import Executor
from flexspec.sampling import SamplingParams
from flexspec.types import DType

CONFIG = tiny_config()
SSM_CONFIG = tiny_config(layers=1, heads=2, kv_heads=1, head_dim=32)
PLANS = [
    "chain:4/sources=suffix+ngram",
    "chain:3/sources=ssm",
    "tree:2,2,1",
    "tree:1,1,3,1/sources=ssm+suffix/nodes=20",
    "budget:24/depth=8/sources=suffix+ngram+ssm",
    "budget:200/depth=30/ssm_depth=3/beam=20/sources=suffix+ngram+ssm",
    "budget:5/depth=2/sources=ngram",
]
MIXED = "tree:2,2,1/sampled=mixed"
SAMPLED = [
    SamplingParams(max_tokens=24, temperature=0.9, seed=5),
    SamplingParams(max_tokens=24, temperature=1.3, top_p=0.8, seed=6),
    SamplingParams(max_tokens=24, temperature=0.7, top_k=9, seed=7),
    SamplingParams(max_tokens=24, temperature=1.0, min_p=0.05, seed=-8),
    SamplingParams(max_tokens=24),
]


@dataclass
class Models:
    dtype: DType
    llm: Executor
    ssm: Executor


def prompts(count: int) -> list[list[int]]:
    """Of many lengths; some repeat themselves, so that look-up drafts hit."""
    rng = np.random.default_rng(count)
    made = [rng.integers(0, CONFIG.vocab_size, int(size)).tolist() for size in rng.integers(1, 50, count)]
    return [prompt * 2 if i % 3 == 0 else prompt for i, prompt in enumerate(made)]


def alone(
    llm: Executor, asked: Sequence[list[int]], params: Sequence[SamplingParams], **options: object
) -> list[Answer]:
    """Plain decoding, one request after the other: what every other way must repeat."""
    made = make_engine(llm, "off", **options)  # type: ignore[arg-type]
    return [made.answers([prompt], [one])[0] for prompt, one in zip(asked, params, strict=True)]


def same(got: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Every request has the same tokens, text and end."""
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert (one.tokens, one.text) == (other.tokens, other.text), f"request {i}"
        assert one.last.finish_reason == other.last.finish_reason, f"request {i}"

"""SmolLM2-135M-Instruct cut for ranks: nine heads and three kv heads, which two ranks do not divide; greedy tokens."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from real_model import MODEL, NEEDS_MODEL
from step_models import chain_rows

from flexspec.compiler.artifact.plan import Stage
from flexspec.compiler.frontends.open_model import open_model
from flexspec.compiler.partition.cut_ranks import partition
from flexspec.models.registry import build_model, expected_weights
from flexspec.runtime.executors.pages import pack_rows
from flexspec.runtime.executors.step import Executor
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.runtime.reference.ranks import ReferenceRanks
from flexspec.types import DType

PROMPT, TOKENS, PAGES = [504, 253, 2066, 284, 338, 11, 253, 1165, 282], 6, 2
STAGES = [Stage(0, 13, (0, 1)), Stage(13, 30, (2,))]  # TP 2, then TP 1

pytestmark = NEEDS_MODEL


def greedy(executor: Executor) -> tuple[list[int], NDArray[np.float32]]:
    """The tokens, and the logits [TOKENS, V] that gave them."""
    ids, context, logits = PROMPT, 0, []
    tokens: list[int] = []
    for _ in range(TOKENS):
        result = executor.step(pack_rows([chain_rows(ids, context, [1, 0], all_logits=False)]), want_logits=True)
        context += len(ids)
        ids = [int(result.argmax_L[0])]
        tokens += ids
        assert result.logits_LV is not None
        logits.append(result.logits_LV)
    return tokens, np.concatenate(logits)


def test_ranks_of_a_real_model_write_the_same_tokens() -> None:
    """Float32; logits are 33 at most and differ by some 6e-5, as two float32 computations of this model do."""
    model = open_model(MODEL, "a model")
    graph = build_model(model.config, DType.F32)
    get = lru_cache(None)(model.weights.get)
    weights = {name: get(name) for name in expected_weights(graph)}
    tokens, logits = greedy(ReferenceExecutor(graph, weights, PAGES, 16))
    found, cut = greedy(ReferenceRanks(partition(graph, STAGES), get, PAGES, 16))
    assert found == tokens
    assert np.abs(cut - logits).max() < 1e-5 * np.abs(logits).max()

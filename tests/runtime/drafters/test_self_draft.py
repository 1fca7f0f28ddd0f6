"""An SSM that is the LLM itself: everything it drafts is accepted, across page edges, with the real attention."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from flexspec.draft_plan import Expansion
from flexspec.graph import Graph
from flexspec.models.config import ModelConfig
from flexspec.models.llama import build_llama
from flexspec.runtime.acceptance.accept import accept_greedy
from flexspec.runtime.drafters.base import DraftRequest
from flexspec.runtime.drafters.ssm import SsmDrafter
from flexspec.runtime.executors.pages import RowGroup, pack_rows
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.sampling import SamplingParams
from flexspec.types import DType, Role

CONFIG = ModelConfig("llama", 64, 16, 2, 4, 2, 4, 24, 1e-5, 512)


def executor() -> ReferenceExecutor:
    graph = build_llama(CONFIG, DType.F32)
    return ReferenceExecutor(graph, random_weights(graph), 16, 64)


def random_weights(graph: Graph) -> Mapping[str, NDArray[np.float32]]:
    rng = np.random.default_rng(3)
    weights = {}
    for value in graph.inputs_of(Role.WEIGHT):
        shape = [int(dim) for dim in value.type.dims]
        weights[value.name] = rng.normal(1.0 if len(shape) == 1 else 0.0, 0.4, shape).astype(np.float32)
    return weights


@pytest.mark.parametrize("vector", [(1, 1, 1, 1), (2, 2, 1)])
def test_everything_drafted_is_accepted(vector: tuple[int, ...]) -> None:
    llm, drafter = executor(), SsmDrafter(executor(), Expansion.static(vector), CONFIG.vocab_size)
    text = [5, 9, 33, 2, 17]
    pages = list(range(8))
    rows = RowGroup(text, range(len(text)), 0, pages, [len(text) - 1])
    drafter.begin(1, text)
    new = [int(llm.step(pack_rows([rows]), want_logits=False).argmax_L[0])]
    cached = len(text)
    while len(text) < 120:
        text += new
        drafter.observe(1, new, None)
        (tree,) = drafter.propose([DraftRequest(1, text[-1], 64, 64, SamplingParams())])
        depths = tree.depths
        bits = [sum(1 << node for node in tree.path(i)) for i in range(len(tree))]
        rows = RowGroup(tree.tokens, [cached + int(d) for d in depths], cached, pages, range(len(tree)), bits)
        accepted = accept_greedy(tree, llm.step(pack_rows([rows]), want_logits=False).argmax_L)
        assert len(accepted.nodes) == len(vector) + 1, f"rejected at {len(text)} tokens"
        moved = np.array(accepted.nodes, np.int32)
        slots = np.array([pages[s // 32] * 32 + s % 32 for s in range(256)], np.int32)
        llm.move_kv(slots[cached + moved], slots[cached : cached + len(moved)])
        cached += len(moved)
        new = accepted.tokens(tree)

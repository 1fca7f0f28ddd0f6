"""All ranks of a plan on generated CPU programs, a thread each, against the uncut graph on the references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from step_models import chain_rows, random_tree, random_weights, slots, tiny_config, tree_rows

from flexspec.compiler.artifact.plan import Stage
from flexspec.compiler.partition.lower_ranks import lower_ranks
from flexspec.compiler.passes.pipeline import LLM_PASSES
from flexspec.errors import EngineError
from flexspec.graph import Graph
from flexspec.kernels.cpu.exchange import split_logits
from flexspec.kernels.cpu.render import render
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model
from flexspec.retype import store_weights
from flexspec.runtime.executors.cpu import CpuExecutor
from flexspec.runtime.executors.pages import pack_rows
from flexspec.runtime.executors.step import Executor, StepBatch
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.runtime.reference.threads import CpuRanks
from flexspec.types import DType, Role
from flexspec.weight_formats.registry import stored_values, weight_formats

PAGES, ROWS = 5, 48
CONFIG = tiny_config(
    heads=9, kv_heads=3, qkv_bias=True, output_bias=True, max_positions=160
)  # heads as in SmolLM2-135M
EVEN = replace(CONFIG, layers=1, heads=8, kv_heads=4, vocab_size=204)


def model(config: ModelConfig = CONFIG, dtype: DType = DType.F32) -> Graph:
    return build_model(config, dtype, taps=(1,))


def steps() -> list[StepBatch]:
    rng = np.random.default_rng(3)
    prompts = [chain_rows(rng.integers(0, 203, 35).tolist(), 0, [3, 1]), chain_rows([5, 202], 0, [2])]
    tree = [tree_rows(random_tree(rng, 9, 203), 35, [3, 1]), chain_rows([7], 2, [2])]
    return [pack_rows(prompts), pack_rows(tree)]


def run_rounds(executor: Executor) -> list[NDArray[np.float32]]:
    """Prefill, a tree step, and a decode step behind moved KV: logits and features of each."""
    results = [executor.step(batch, want_logits=True) for batch in steps()]
    executor.move_kv(slots([3, 1], [37, 40]), slots([3, 1], [36, 37]))
    results.append(executor.step(pack_rows([chain_rows([9], 38, [3, 1])]), want_logits=True))
    assert all(np.array_equal(r.argmax_L, r.logits_LV.argmax(-1)) for r in results if r.logits_LV is not None)
    return [x for r in results for x in (r.logits_LV, r.features_TE) if x is not None]


def check(
    graph: Graph,
    stages: list[Stage],
    exact: Graph,
    limit: float,
    threads: int,
    prefer: Mapping[str, str] | None = None,
) -> None:
    """Outputs within ``limit`` of the largest, of those that the references compute for ``exact``."""
    weights = random_weights(graph, scale=0.1)
    parts = lower_ranks(graph, stages, LLM_PASSES, prefer=prefer)
    ranks = CpuRanks(parts, weights.__getitem__, pages=PAGES, max_rows=ROWS, threads=threads)
    assert (ranks.vocab_size, ranks.max_positions) == (graph.types()[graph.outputs[0]].dims[1], 160)
    found, wanted = run_rounds(ranks), run_rounds(ReferenceExecutor(exact, weights, PAGES, ROWS))
    for batch in steps():  # logits stay where they are, only the best of each rank travels
        short, whole = (ranks.step(batch, want_logits=wants) for wants in (False, True))
        assert short.logits_LV is None and np.array_equal(short.argmax_L, whole.argmax_L)
    ranks.close()
    assert len(found) == len(wanted) == 6
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and np.abs(b).max() > 0.5
        assert np.abs(a - b).max() < limit * max(1.0, np.abs(b).max())


def test_ragged_stages_and_heads_that_do_not_divide() -> None:
    """One rank, then two with six heads and three: hop, copy, reduces, vocabulary shares of 102 and 101 rows."""
    check(model(), [Stage(0, 1, (3,)), Stage(1, 2, (1, 0))], model(), 1e-5, 1)


@pytest.mark.parametrize("layout", ["ffn", "experts"])
def test_experts_over_three_ranks(layout: str) -> None:
    """Two, two and one expert, or 27, 27 and 26 columns of each; then a rank with all of them."""
    config = replace(
        CONFIG, family="qwen3_moe", experts=5, experts_per_token=3, expert_ffn_size=80, qk_norm=True, qkv_bias=False,
        output_bias=False,
    )  # fmt: skip
    stages = [Stage(0, 1, (2, 0, 3)), Stage(1, 2, (1,))]
    check(model(config), stages, model(config), 1e-5, 2, {"moe_experts": layout})


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_two_ranks_with_two_threads_each(dtype: DType) -> None:
    """Both run one program, which reads a part of the embedding."""
    check(model(EVEN, dtype), [Stage(0, 1, (0, 1))], model(EVEN), 1e-5 if dtype is DType.F32 else 0.02, 2)


def test_ties_across_ranks_go_to_the_lowest_index() -> None:
    """The second rank's half of the vocabulary repeats the first's: every best logit is there twice."""
    graph = model(EVEN)
    weights = dict(random_weights(graph, scale=0.1))
    half = weights["embed_tokens.weight"][:102]
    weights["embed_tokens.weight"] = np.concatenate([half, half])
    parts = lower_ranks(graph, [Stage(0, 1, (0, 1))], LLM_PASSES)
    ranks = CpuRanks(parts, weights.__getitem__, pages=PAGES, max_rows=ROWS)
    for wants in (False, True):
        assert ranks.step(steps()[0], want_logits=wants).argmax_L.max() < 102
    weights["embed_tokens.weight"][:, 0] = np.nan
    broken = CpuRanks(parts, weights.__getitem__, pages=PAGES, max_rows=ROWS)
    for wants in (False, True):
        assert (broken.step(steps()[0], want_logits=wants).argmax_L == -1).all()
    ranks.close()
    broken.close()


def test_ranks_with_shares_of_one_size_run_one_program() -> None:
    parts = lower_ranks(model(replace(EVEN, layers=2)), [Stage(0, 1, (4, 5, 6, 7)), Stage(1, 2, (0, 1))], LLM_PASSES)
    sources = [render(split_logits(part.graph)[0]).source for part in parts]
    assert len({*sources[:2]}) == len({*sources[2:4]}) == len({*sources[4:]}) == 1
    assert len({*sources}) == 3  # two of the first stage send, two do not
    assert "exchange(tid, " in sources[0] and "rank4" not in sources[0]
    uneven = lower_ranks(model(), [Stage(0, 2, (0, 1))], LLM_PASSES)
    assert len({render(split_logits(part.graph)[0]).source for part in uneven}) == 2


def test_a_rank_alone_is_refused_and_a_missing_one_is_no_hang() -> None:
    graph = model()
    weights = random_weights(graph, scale=0.1)
    parts = lower_ranks(graph, [Stage(0, 1, (3,)), Stage(1, 2, (1, 0))], LLM_PASSES)  # built above
    ranks = CpuRanks(parts[:2], weights.__getitem__, pages=PAGES, max_rows=ROWS, timeout_s=0.2)
    with pytest.raises(EngineError, match="wait for others: .*replicate"):
        ranks.step(steps()[0], want_logits=True)
    ranks.close()
    last = CpuExecutor.from_graph(parts[0].graph, weights.__getitem__, pages=PAGES, max_rows=ROWS)
    with pytest.raises(EngineError, match="one rank's program alone"):
        last.step(steps()[0], want_logits=True)
    last.close()


def test_ranks_store_weights_in_another_format() -> None:
    """Rows and columns of float16 tiles, and a share of the vocabulary: the bits of weights expanded before."""
    plain = model(EVEN, DType.BF16)
    graph = store_weights(plain, weight_formats()["f16"])
    weights = random_weights(graph, scale=0.1)
    expanded = {v.name: stored_values(v.name, v.type, weights[v.name]) for v in graph.inputs_of(Role.WEIGHT)}
    found = []
    for each, values in ((graph, weights), (plain, expanded)):
        parts = lower_ranks(each, [Stage(0, 1, (0, 1))], LLM_PASSES)
        ranks = CpuRanks(parts, values.__getitem__, pages=PAGES, max_rows=ROWS)
        found.append(run_rounds(ranks))
        ranks.close()
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))

"""All ranks of a plan in one process against the uncut graph, in float32: logits, features, and what is cached.

Legend: T rows, L logit rows, E hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray
from step_models import chain_rows, random_tree, slots, tree_rows

from flexspec.compiler.artifact.plan import Stage
from flexspec.compiler.partition.cut_ranks import partition
from flexspec.compiler.partition.lower_ranks import lower_ranks
from flexspec.compiler.partition.shares import cut_weights
from flexspec.compiler.passes.pipeline import LLM_PASSES, SSM_PASSES
from flexspec.errors import EngineError, GraphError, WeightError
from flexspec.graph import Graph
from flexspec.models.config import ModelConfig
from flexspec.models.fused_state import graft_fuse_head
from flexspec.models.registry import build_model, expected_weights, families
from flexspec.ops.rope import RopeConfig
from flexspec.runtime.executors.pages import RowGroup, pack_rows
from flexspec.runtime.executors.step import Executor, StepBatch
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.runtime.reference.ranks import ReferenceRanks
from flexspec.types import DType

PAGES, MAX_ROWS, LIMIT = 5, 48, 1e-5
VOCAB = 101  # a prime: no degree divides it
SMALL = ModelConfig("llama", VOCAB, 24, 3, 8, 2, 4, 40, 1e-5, 256, rope=RopeConfig(500.0))
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"tied_embeddings": True},
    "mistral": {"kv_heads": 4, "head_dim": 6, "output_bias": True, "mlp_bias": True},
    "qwen2": {"qkv_bias": True, "tied_embeddings": True},
    "qwen3": {"qk_norm": True, "kv_heads": 1},
    "mixtral": {"experts": 5, "experts_per_token": 2, "expert_ffn_size": 26, "normalize_routing": True},
    "qwen3_moe": {
        "experts": 11,
        "experts_per_token": 3,
        "expert_ffn_size": 9,
        "qk_norm": True,
        "dense_layers": (1,),
    },
    "fused_state": {},
}
PLANS = [",".join([str(tp)] * pp) for tp, pp in product((1, 2, 4, 8), (1, 2, 3))]
RAGGED = ["2,1", "1,4", "4,2", "8,1,2", "1,8,4", "3,2"]


def graph_of(family: str) -> Graph:
    """A model of three blocks; LLMs with taps, since features must come along."""
    config = replace(SMALL, family=family, **FAMILIES[family])  # type: ignore[arg-type]
    if family == "fused_state":
        return build_model(config, DType.F32, reduced_vocab_size=31)
    return build_model(config, DType.F32, taps=(0, 2))


def weights_of(graph: Graph) -> dict[str, NDArray[np.float32]]:
    """Norms and biases too are random: ones and zeros would hide faults."""
    rng = np.random.default_rng(7)
    return {
        name: rng.normal(float("norm" in name), 0.2, shape).astype(np.float32)
        for name, shape in expected_weights(graph).items()
    }


def stages_of(degrees: str, blocks: int = 3, first_rank: int = 0) -> list[Stage]:
    """``2,1``: the blocks shared out over two stages, the first of degree 2; ranks are counted up."""
    wanted = [int(text) for text in degrees.split(",")]
    edges = [blocks * i // len(wanted) for i in range(len(wanted) + 1)]
    starts = [first_rank + sum(wanted[:i]) for i in range(len(wanted) + 1)]
    return [Stage(edges[i], edges[i + 1], tuple(range(starts[i], starts[i + 1]))) for i in range(len(wanted))]


def steps(reads_features: bool) -> list[StepBatch]:
    """A prefill of two requests across a page edge; a tree of one with a decoded row of the other."""
    rng = np.random.default_rng(3)
    long = chain_rows(rng.integers(0, VOCAB, 35).tolist(), 0, [3, 1])
    groups = [[long, chain_rows([5, 6], 0, [2])]]
    groups += [[tree_rows(random_tree(rng, 9, VOCAB), 35, [3, 1]), chain_rows([7], 2, [2])]]
    return [_pack(rows, reads_features) for rows in groups]


def _pack(groups: list[RowGroup], reads_features: bool) -> StepBatch:
    if not reads_features:
        return pack_rows(groups)
    rng = np.random.default_rng(len(groups[0].ids))
    return pack_rows([replace(g, features=[*rng.normal(size=(len(g.ids), 24))]) for g in groups])


def last_step() -> list[RowGroup]:
    return [chain_rows([9], 38, [3, 1])]


def run_rounds(executor: Executor, reads_features: bool) -> list[NDArray[np.float32]]:
    """Logits and features of both steps, and of a decode step behind an accepted path of three (slots 35, 37, 40)."""
    results = [executor.step(batch, want_logits=True) for batch in steps(reads_features)]
    executor.move_kv(slots([3, 1], [37, 40]), slots([3, 1], [36, 37]))
    results.append(executor.step(_pack(last_step(), reads_features), want_logits=True))
    found = [array for result in results for array in (result.logits_LV, result.features_TE)]
    assert all(np.array_equal(r.argmax_L, r.logits_LV.argmax(-1)) for r in results if r.logits_LV is not None)
    return [array for array in found if array is not None]


def check(
    graph: Graph, stages: Sequence[Stage], *, lowered: bool = False, prefer: Mapping[str, str] | None = None
) -> ReferenceRanks:
    weights = weights_of(graph)
    passes = SSM_PASSES if graph.name == "ssm" else LLM_PASSES
    if lowered:
        parts = lower_ranks(graph, stages, passes, prefer=prefer)
    else:
        parts = partition(graph, stages, prefer=prefer)
    reads_features = any(value.name == "features_TE" for value in graph.inputs)
    ranks = ReferenceRanks(parts, weights.__getitem__, PAGES, MAX_ROWS)
    found = run_rounds(ranks, reads_features)
    wanted = run_rounds(ReferenceExecutor(graph, weights, PAGES, MAX_ROWS), reads_features)
    assert len(found) == len(wanted) == 6
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and np.abs(b).max() > 0.5
        assert np.abs(a - b).max() < LIMIT
    return ranks


def test_this_table_has_every_family() -> None:
    assert set(FAMILIES) == set(families())


@pytest.mark.slow(reason="every family cut in every way")
@pytest.mark.parametrize("degrees", PLANS + RAGGED)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_what_one_does(family: str, degrees: str) -> None:
    check(graph_of(family), stages_of(degrees), lowered=degrees in ("2,2", "1,8,4", "8"))


@pytest.mark.slow(reason="every family of experts cut in every way")
@pytest.mark.parametrize("degrees", PLANS + RAGGED)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_shared_out(family: str, degrees: str) -> None:
    """Whole experts to each rank where there are enough (5 and 11), else a part of each; one exchange either way."""
    stages = stages_of(degrees)
    ranks = check(graph_of(family), stages, lowered=degrees in ("4", "4,2", "8"), prefer={"moe_experts": "experts"})
    experts = FAMILIES[family]["experts"]
    for part in ranks.parts:
        degree = stages[part.stage].degree
        stacks = [each for each in part.weights if "experts.gate_proj" in each.name]
        dim = None if degree == 1 else 0 if degree <= experts else 1  # type: ignore[operator]
        assert {each.dim for each in stacks} == {dim} if stacks else family == "qwen3_moe"
    if len(stages) == 1 and stages[0].degree > 1:
        assert ranks.traffic == {"reduce": 7, "combine": 1}


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 8), (6, 2), (8, 1)])
@pytest.mark.parametrize("degrees", ["2", "3,4", "6"])
def test_heads_that_do_not_divide(heads: int, kv_heads: int, degrees: str) -> None:
    """Nine heads with three kv heads are SmolLM2-135M's."""
    config = ModelConfig("llama", VOCAB, 24, 2, heads, kv_heads, 4, 37, 1e-5, 256)
    check(build_model(config, DType.F32, taps=(1,)), stages_of(degrees, 2))


def test_a_fuse_head_is_cut_too() -> None:
    """Its parts are computed where their taps are, and summed up on the way."""
    graph = graft_fuse_head(build_model(SMALL, DType.F32, taps=(1, 2)))
    for lowered in (False, True):
        check(graph, stages_of("2,1,2"), lowered=lowered)


def test_ranks_are_named_by_the_plan() -> None:
    """Ranks need not be counted from 0, nor rise."""
    stages = [Stage(0, 2, (7, 3)), Stage(2, 3, (5, 9, 0))]
    ranks = check(graph_of("llama"), stages)
    assert [part.rank for part in ranks.parts] == [7, 3, 5, 9, 0]


def test_exchanges_of_a_step() -> None:
    """Two reduces a block and one of the embedding, one combine of the logits; two ranks send to two, which hand on."""
    ranks = check(build_model(SMALL, DType.F32, taps=(1,)), stages_of("2,4"))
    assert ranks.traffic == {"reduce": 7, "combine": 1, "hop": 2, "replicate": 2}


def test_kv_heads_are_shared_where_ranks_outnumber_them() -> None:
    ranks = check(graph_of("llama"), stages_of("4"))
    first, second, third = (ranks.read_kv(rank)["layers.1.k_cache"] for rank in (0, 1, 2))
    assert first.shape[2] == 1 and first.abs().max() > 0.0
    assert (first == second).all() and (first != third).any()


def test_one_part_alone_is_refused() -> None:
    part = partition(graph_of("llama"), stages_of("2"))[0]
    weights = weights_of(graph_of("llama"))
    with pytest.raises(WeightError, match=r"embed_tokens.weight of shape \[5, 24\]"):
        ReferenceRanks([part], lambda name: weights[name][:5], PAGES, MAX_ROWS)
    ranks = ReferenceRanks([part], weights.__getitem__, PAGES, MAX_ROWS)
    with pytest.raises(EngineError, match="reduce"):
        ranks.step(steps(False)[0], want_logits=True)
    whole = ReferenceExecutor(part.graph, cut_weights(part.weights, weights.__getitem__), PAGES, MAX_ROWS)
    with pytest.raises(GraphError, match="meets other ranks at a reduce"):
        whole.step(steps(False)[0], want_logits=True)


def test_runs_are_equal_to_the_bit() -> None:
    graph = graph_of("qwen3")
    parts, get = partition(graph, stages_of("4,2")), weights_of(graph).__getitem__
    first, second = (run_rounds(ReferenceRanks(parts, get, PAGES, MAX_ROWS), False) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))

"""A family with learned positions and weights of its own names: references, a CPU program, and ranks agree on it."""

from __future__ import annotations

import numpy as np
import pytest
from step_models import chain_rows, on_cpu, random_tree, random_weights, tree_rows

from flexspec.builder import GraphBuilder
from flexspec.compiler.artifact.plan import Stage
from flexspec.compiler.partition.lower_ranks import lower_ranks
from flexspec.compiler.passes.pipeline import LLM_PASSES
from flexspec.errors import CompileError, EngineError
from flexspec.graph import Graph, Value
from flexspec.kernels.cpu.render import render
from flexspec.ops.bounds import IDS, NO_LIMIT, POSITIONS, input_bound
from flexspec.runtime.executors.pages import pack_rows
from flexspec.runtime.executors.step import StepBatch
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.runtime.reference.threads import CpuRanks
from flexspec.types import DType

VOCAB, WIDTH, HEADS, BLOCKS, POSITION_ROWS = 50, 32, 4, 2, 40


def toy(*, learned: bool = True) -> Graph:
    """A decoder without rotary embedding; positions are rows of a table of POSITION_ROWS."""
    b = GraphBuilder("toy", DType.F32)
    step = b.step_inputs()
    x = b.embedding(step.ids_T, b.weight("wte.weight", (VOCAB, WIDTH)))
    if learned:
        x = b.add(x, b.embedding(step.positions_T, b.weight("wpe.weight", (POSITION_ROWS, WIDTH))))
    caches: list[Value] = []
    for i in range(BLOCKS):
        with b.block(i):
            h = b.rms_norm(x, b.weight(f"h.{i}.norm.weight", (WIDTH,)), 1e-5)
            q, k, v = (
                b.split_heads(b.linear(h, b.weight(f"h.{i}.{name}.weight", (WIDTH, WIDTH))), HEADS) for name in "qkv"
            )
            k_cache, v_cache = (b.kv_cache(f"h.{i}.{name}_cache", HEADS, WIDTH // HEADS) for name in "kv")
            o, *new = b.attention(q, k, v, k_cache, v_cache, step, (WIDTH // HEADS) ** -0.5)
            x = b.add(x, b.linear(b.merge_heads(o), b.weight(f"h.{i}.o.weight", (WIDTH, WIDTH))))
            caches += new
    rows = b.rms_norm(b.select_rows(x, step.logit_rows_L), b.weight("norm.weight", (WIDTH,)), 1e-5)
    return b.finish(b.linear(rows, b.weight("head.weight", (VOCAB, WIDTH)), name="logits_LV"), *caches)


def steps() -> list[StepBatch]:
    """Two prompts, then a tree whose deepest rows come near the last position, and one more token."""
    rng = np.random.default_rng(5)
    prompts = [chain_rows(rng.integers(0, VOCAB, 30).tolist(), 0, [2, 0]), chain_rows([3, 49], 0, [1])]
    tree = [tree_rows(random_tree(rng, 9, VOCAB), 30, [2, 0]), chain_rows([7], 2, [1])]
    return [pack_rows(prompts), pack_rows(tree)]


def beyond() -> StepBatch:
    return pack_rows([chain_rows([1], POSITION_ROWS, [2, 0])])


def test_positions_end_where_the_table_does() -> None:
    assert (input_bound(toy(), IDS), input_bound(toy(), POSITIONS)) == (VOCAB, POSITION_ROWS)
    assert input_bound(toy(learned=False), POSITIONS) == NO_LIMIT
    facts = render(toy()).facts
    assert (facts.id_rows, facts.max_positions) == (VOCAB, POSITION_ROWS)


def test_the_program_equals_the_reference() -> None:
    graph = toy()
    weights = random_weights(graph)
    program, reference = on_cpu(graph, weights), ReferenceExecutor(graph, weights, pages=4, max_rows=48)
    assert program.max_positions == reference.max_positions == POSITION_ROWS
    for batch in steps():
        got, expected = (each.step(batch, want_logits=True).logits_LV for each in (program, reference))
        assert got is not None and expected is not None and np.abs(expected).max() > 0.5
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)
    for executor in (program, reference):
        with pytest.raises(EngineError, match=f"below position {POSITION_ROWS}"):
            executor.step(beyond(), want_logits=True)
    program.close()


def test_ranks_share_both_tables() -> None:
    """Ids and positions are cut by rows, each at a place of its own."""
    graph = toy()
    weights = random_weights(graph)
    parts = lower_ranks(graph, [Stage(0, 1, (0, 1)), Stage(1, 2, (2, 3))], LLM_PASSES)
    assert {input_bound(part.graph, POSITIONS) for part in parts} == {POSITION_ROWS, NO_LIMIT}
    ranks = CpuRanks(parts, weights.__getitem__, pages=4, max_rows=48)
    reference = ReferenceExecutor(graph, weights, pages=4, max_rows=48)
    assert ranks.max_positions == POSITION_ROWS
    for batch in steps():
        got, expected = (each.step(batch, want_logits=True).logits_LV for each in (ranks, reference))
        assert got is not None and expected is not None
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)
    ranks.close()


def test_rows_of_a_table_are_chosen_by_step_inputs_alone() -> None:
    b = GraphBuilder("odd", DType.F32)
    step = b.step_inputs()
    x = b.embedding(step.ids_T, b.weight("wte.weight", (VOCAB, WIDTH)))
    y = b.select_rows(b.add(x, b.embedding(b.input("other_T", ("T",), DType.I32), b.weight("w", (8, WIDTH)))),
                      step.logit_rows_L)  # fmt: skip
    with pytest.raises(CompileError, match="%other_T of graph odd.*one of the step inputs ids_T, positions_T"):
        render(b.finish(b.linear(y, b.weight("head.weight", (VOCAB, WIDTH)))))

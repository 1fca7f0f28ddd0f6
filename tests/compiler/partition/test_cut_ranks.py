"""Partitioned graphs as text, shares of axes, what is refused, and that the parts of a plan fit together."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexspec.compiler.artifact.plan import Stage
from flexspec.compiler.partition.check_ranks import check_ranks
from flexspec.compiler.partition.cut_ranks import partition
from flexspec.compiler.partition.lower_ranks import lower_ranks
from flexspec.compiler.partition.rank_part import RankPart
from flexspec.compiler.partition.shares import even_ranges, head_ranges
from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.errors import CompileError, GraphError, PartitionError, WeightError
from flexspec.graph import Graph
from flexspec.kernels.cpu.render import render
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model, expected_weights
from flexspec.text import graph_lines, parse_graph, print_graph, print_node
from flexspec.types import DType
from flexspec.verifier import verify

CONFIG = ModelConfig("llama", 50, 32, 3, 8, 2, 4, 48, 1e-5, 64, tied_embeddings=True, output_bias=True)
MLP = """\
graph mlp {
  input %x: f32[T,8]:activation
  input %gate.weight: f32[6,8]:weight
  input %up.weight: f32[6,8]:weight
  input %down.weight: f32[8,6]:weight
  input %down.bias: f32[8]:weight
  input %layers.0.norm.weight: f32[8]:weight
  %gate: f32[T,6]:activation = linear(%x, %gate.weight) @0
  %up: f32[T,6]:activation = linear(%x, %up.weight) @0
  %h: f32[T,6]:activation = swiglu(%gate, %up) @0
  %down: f32[T,8]:activation = linear(%h, %down.weight, %down.bias) @0
  %y: f32[T,8]:activation = add(%x, %down) @0
  %z: f32[T,8]:activation = rms_norm(%y, %layers.0.norm.weight) {eps=1e-05} @0
  return %z
}
"""


def model(**changes: object) -> Graph:
    return build_model(replace(CONFIG, **changes), DType.F32)  # type: ignore[arg-type]


def nodes_of(part: RankPart) -> list[str]:
    return [print_node(node).replace(":activation", "") for node in part.graph.nodes]


def test_an_mlp_before_and_after() -> None:
    first, second, third, _ = partition(parse_graph(MLP), [Stage(0, 1, (0, 1, 2, 3))])
    assert nodes_of(first) == [
        "%gate: f32[T,2] = linear(%x, %gate.weight) @0",
        "%up: f32[T,2] = linear(%x, %up.weight) @0",
        "%h: f32[T,2] = swiglu(%gate, %up) @0",
        "%down: f32[T,8] = linear(%h, %down.weight, %down.bias) @0",
        "%down.whole: f32[T,8] = reduce(%down) {ranks=[0, 1, 2, 3]} @0",
        "%y: f32[T,8] = add(%x, %down.whole) @0",
        "%z: f32[T,8] = rms_norm(%y, %layers.0.norm.weight) {eps=1e-05} @0",
    ]
    assert [str(value.type) for value in third.graph.inputs[1:4]] == [
        "f32[1,8]:weight", "f32[1,8]:weight", "f32[8,1]:weight",
    ]  # fmt: skip
    assert [(w.name, w.dim, w.first, w.end, w.zeros) for w in second.weights] == [
        ("gate.weight", 0, 2, 4, False),
        ("up.weight", 0, 2, 4, False),
        ("down.weight", 1, 2, 4, False),
        ("down.bias", None, 0, 0, True),
        ("layers.0.norm.weight", None, 0, 0, False),
    ]


def test_a_whole_operand_is_partitioned_where_the_other_is_cut() -> None:
    body = MLP.replace("swiglu(%gate, %up)", "swiglu(%gate, %r)").replace(
        "  input %gate", "  input %r: f32[T,6]:activation\n  input %gate", 1
    )
    _, second = partition(parse_graph(body), [Stage(0, 1, (4, 5))])
    assert nodes_of(second)[1:3] == [
        "%r.part: f32[T,3] = partition(%r) {dim=1, end=6, first=3}",
        "%h: f32[T,3] = swiglu(%gate, %r.part) @0",
    ]
    assert "up.weight" not in {each.name for each in second.weights}


EXPERTS = {"family": "mixtral", "experts": 5, "experts_per_token": 2, "expert_ffn_size": 9, "layers": 1}


@pytest.mark.parametrize("prefer", [None, {"moe_experts": "ffn"}, {"moe_experts": "experts"}])
def test_experts_before_and_after(prefer: dict[str, str] | None) -> None:
    """By ffn, or whole experts with their columns of the routing; the router stays whole either way."""
    _, second = partition(model(**EXPERTS), [Stage(0, 1, (0, 1))], prefer=prefer)
    ops = ("router(", "partition(", "moe_experts(")
    routing, *rest = [line for line in nodes_of(second) if any(op in line for op in ops)]
    assert "f32[T,5] = router(" in routing
    stacks = {
        each.name.split(".")[-2]: (each.dim, each.first, each.end) for each in second.weights if "experts" in each.name
    }
    if prefer == {"moe_experts": "experts"}:
        assert len(rest) == 2 and "f32[T,2] = partition(" in rest[0] and "{dim=1, end=5, first=3}" in rest[0]
        assert stacks == {"gate_proj": (0, 3, 5), "up_proj": (0, 3, 5), "down_proj": (0, 3, 5)}
    else:
        assert len(rest) == 1
        assert stacks == {"gate_proj": (1, 5, 9), "up_proj": (1, 5, 9), "down_proj": (2, 5, 9)}
    assert "{experts=5, top_k=2}" in rest[-1]  # of the whole model: what is paid follows from what is held


def test_layouts_that_an_operator_does_not_have_are_refused() -> None:
    with pytest.raises(PartitionError, match=r"(?s)layout 'rows' of moe_experts.*one of replicated, ffn, experts"):
        partition(model(**EXPERTS), [Stage(0, 1, (0, 1))], prefer={"moe_experts": "rows"})
    with pytest.raises(GraphError, match="unknown operator 'experts'"):
        partition(model(**EXPERTS), [Stage(0, 1, (0, 1))], prefer={"experts": "ffn"})
    with pytest.raises(PartitionError, match=r"experts.gate_proj.weight has 9 parts to cut, for 10 ranks"):
        partition(model(**EXPERTS, heads=10), [Stage(0, 1, tuple(range(10)))], prefer={"moe_experts": "experts"})


def test_weights_may_have_any_names() -> None:
    """Stages are cut by the blocks that the nodes carry, whatever their weights are called."""
    stages = [Stage(0, 1, (0, 1)), Stage(1, 3, (2, 3, 4))]
    renamed = parse_graph(print_graph(model()).replace("%layers.", "%h."))
    parts = partition(renamed, stages)
    assert {name for part in parts for name in part.graph.types() if "layers" in name} == set()
    assert [print_graph(part.graph).replace("%h.", "%layers.") for part in parts] == [
        print_graph(part.graph) for part in partition(model(), stages)
    ]


def test_a_graph_without_blocks_is_refused() -> None:
    bare = parse_graph(MLP.replace(" @0", ""))
    with pytest.raises(PartitionError, match=r"(?s)belong to no block.*with b.block\(i\)"):
        partition(bare, [Stage(0, 1, (0,))])


def test_stages_meet_by_send_and_recv() -> None:
    """Two ranks, then four: two of the four receive, and forward to their peers."""
    parts = partition(model(), [Stage(0, 1, (0, 1)), Stage(1, 3, (2, 3, 4, 5))])
    assert [(part.rank, part.stage, part.results) for part in parts] == [
        (0, 0, 0), (1, 0, 0), (2, 1, 1), (3, 1, 1), (4, 1, 1), (5, 1, 1),
    ]  # fmt: skip
    x = parts[0].graph.outputs[0].removesuffix(".to1")
    arriving = 'columns=[32], dtype="f32"'
    assert nodes_of(parts[1])[-1] == f"%{x}.to1: f32[T,32] = send(%{x}) {{channel=0, to=3}} @0"
    assert nodes_of(parts[3])[:2] == [
        f"%{x}.recv: f32[T,32] = recv(%ids_T) {{channel=0, {arriving}, source=1}}",
        f"%{x}: f32[T,32] = replicate(%{x}.recv) {{{arriving}, ranks=[3, 5], root=3}}",
    ]
    assert nodes_of(parts[5])[0] == f"%{x}: f32[T,32] = replicate(%ids_T) {{{arriving}, ranks=[3, 5], root=3}}"
    back = partition(model(), [Stage(0, 1, (2, 3, 4, 5)), Stage(1, 3, (0, 1))])
    assert [part.graph.outputs[0].endswith(".to1") for part in back[:4]] == [True, True, False, False]


def test_logits_are_whole_on_every_rank_of_the_last_stage() -> None:
    parts = partition(model(), [Stage(0, 3, (0, 1, 2))])
    for number, part in enumerate(parts):
        assert part.graph.outputs[0] == "logits_LV"
        sizes = f"part={number}, ranks=[0, 1, 2], sizes=[17, 17, 16]"
        assert nodes_of(part)[-1] == f"%logits_LV: f32[L,50] = combine(%logits_LV.part) {{dim=1, {sizes}}}"
        (table,) = [each for each in part.weights if each.source == "embed_tokens.weight"]
        assert (table.dim, table.first, table.end) == (0, (0, 17, 34)[number], (17, 34, 50)[number])


def test_one_rank_is_the_graph_itself() -> None:
    graph = model()
    (part,) = partition(graph, [Stage(0, 3, (0,))])
    assert part.graph == graph and part.graph.hash() == graph.hash()
    assert all(each.dim is None and not each.zeros and each.name == each.source for each in part.weights)


def test_parts_parse_back_and_ranks_of_a_stage_are_alike() -> None:
    parts = partition(model(), [Stage(0, 2, (0, 1, 2, 3)), Stage(2, 3, (4, 5))])
    for part in parts:
        assert parse_graph(print_graph(part.graph)) == part.graph
        verify(part.graph)
        assert expected_weights(part.graph) == {each.name: each.dims() for each in part.weights}
    assert len({part.graph.hash() for part in parts}) == len(parts)  # first_row, part, peers
    assert len({tuple(node.op for node in part.graph.nodes) for part in parts}) == 3  # ranks 2 and 3 send nothing


@pytest.mark.skipif(importlib.util.find_spec("torch_mlir") is None, reason="torch-mlir is not installed")
def test_parts_round_trip_through_mlir() -> None:
    from flexspec.compiler.forms.mlir import from_mlir, to_mlir

    for part in lower_ranks(model(), [Stage(0, 1, (0, 1)), Stage(1, 3, (2, 3, 4))], LLM_PASSES):
        assert from_mlir(to_mlir(part.graph)) == part.graph


def test_passes_fuse_what_is_cut(tmp_path: Path) -> None:
    """q, k and v become one group of the rank's rows, gate and up one product; the dumps show both."""
    parts = lower_ranks(model(), [Stage(0, 2, (0, 1)), Stage(2, 3, (2,))], LLM_PASSES, tmp_path)
    group = next(node for node in parts[1].graph.nodes if node.op == "linear_group")
    assert [value.type.dims for value in group.outputs] == [("T", 16), ("T", 4), ("T", 4)]
    gate = next(node for node in parts[1].graph.nodes if node.op == "linear_swiglu")
    assert gate.outputs[0].type.dims == ("T", 24)
    assert any(node.op == "linear_add" for node in parts[2].graph.nodes)
    assert not any(node.op == "linear_add" for node in parts[1].graph.nodes)  # the sum must be reduced first
    names = sorted(path.name for path in (tmp_path / "rank1").iterdir())
    assert names[0] == "00_input.fsg" and len(names) == 1 + len(LLM_PASSES)
    assert "reduce(" in (tmp_path / "rank1" / "00_input.fsg").read_text()


def test_an_exchange_is_never_dropped() -> None:
    """Rank 3 has no peer in the next stage, and must still sum up its last block with the others."""
    parts = lower_ranks(model(), [Stage(0, 2, (0, 1, 2, 3)), Stage(2, 3, (4,))], LLM_PASSES)
    counts = [sum(node.op == "reduce" for node in part.graph.nodes) for part in parts]
    assert counts == [5, 5, 5, 5, 0]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "stages: 0 blocks; expected 3, the model's"),
        ([Stage(0, 2, (0,))], "stages: 2 blocks; expected 3"),
        ([Stage(0, 4, (0,))], "stages: 4 blocks; expected 3"),
        ([Stage(0, 2, (0,)), Stage(1, 3, (1,))], r"stages\[1\].first_block: 1; expected 2, where the stage before"),
        ([Stage(0, 1, (0,)), Stage(2, 3, (1,))], r"stages\[1\].first_block: 2; expected 1, where"),
        ([Stage(0, 3, (0,)), Stage(3, 3, (1,))], r"stages\[1\].end_block: 3; expected more than"),
        ([Stage(0, 2, (0, 1)), Stage(2, 3, (1,))], "each in one stage only"),
        ([Stage(0, 3, (0, 0))], "each in one stage only"),
        ([Stage(0, 3, (0, -1))], "each in one stage only"),
        ([Stage(0, 3, ())], "at least one rank"),
        ([Stage(0, 3, tuple(range(9)))], r"q_proj.weight has 8 parts to cut, for 9 ranks"),
    ],
)
def test_stages_that_do_not_fit_are_refused(stages: list[Stage], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        partition(model(), stages)


def test_what_cannot_be_cut_is_refused() -> None:
    two = [Stage(0, 3, (0, 1))]
    with pytest.raises(PartitionError, match=r"gate_proj.weight has 1 parts to cut, for 2 ranks"):
        partition(model(ffn_size=1), two)
    with pytest.raises(PartitionError, match="before the passes that fuse"):
        partition(run_passes(model(), LLM_PASSES), two)
    with pytest.raises(PartitionError, match="cut only once"):
        partition(partition(model(), two)[0].graph, two)


def test_the_verifier_reads_the_records_of_parallel_operators() -> None:
    part = partition(model(), [Stage(0, 3, (0, 1))])[0]
    at = next(i for i, node in enumerate(part.graph.nodes) if node.op == "combine")
    nodes = list(part.graph.nodes)
    nodes[at] = nodes[at].with_attr("sizes", (20, 30))
    with pytest.raises(GraphError, match=r"(?s)combine.*with 25 for part=0"):
        verify(replace(part.graph, nodes=tuple(nodes)))


def test_parts_of_two_plans_do_not_fit() -> None:
    stages = [Stage(0, 1, (0, 1)), Stage(1, 3, (2, 3))]
    good = partition(model(), stages)
    check_ranks(good)
    other = partition(model(), [Stage(0, 1, (0,)), Stage(1, 3, (2, 3))])
    for parts in (good[:-1], (*other[:1], *good[1:]), (*good[:2], *other[1:])):
        with pytest.raises(PartitionError, match="a deadlock between ranks"):
            check_ranks(parts)
    with pytest.raises(PartitionError, match="two parts of one rank"):
        check_ranks((*good, good[0]))


def test_the_cpu_backend_refuses_a_share_that_nobody_sums_up() -> None:
    graph = model()
    share = replace(graph, nodes=(graph.nodes[0].with_attr("first_row", 0), *graph.nodes[1:]))
    with pytest.raises(CompileError, match="a part of the vocabulary"):
        render(share)


def test_weight_slices() -> None:
    parts = partition(model(), [Stage(0, 3, (0, 1, 2, 3))])
    whole = np.arange(8 * 32, dtype=np.float32).reshape(8, 32)
    k = [next(w for w in part.weights if w.source.endswith("1.self_attn.k_proj.weight")) for part in parts]
    assert [
        each.take(whole).tolist() == whole[a : a + 4].tolist() for each, a in zip(k, (0, 0, 4, 4), strict=True)
    ] == [True] * 4
    bias = [next(w for w in part.weights if w.source.endswith("1.self_attn.o_proj.bias")) for part in parts]
    ones = np.ones(32, np.float32)
    assert sum(each.take(ones) for each in bias).tolist() == ones.tolist()
    with pytest.raises(WeightError, match=r"shape \[4, 32\]"):
        k[0].take(whole[:4])


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_heads_are_shared_out_whole(kv_heads: int, share: int, data: st.DataObject) -> None:
    """Every head once; a rank holds whole kv heads, or a part of one; loads differ by one kv head or one head."""
    heads = kv_heads * share
    parts = data.draw(st.integers(1, heads))
    if parts > kv_heads and -(-parts // kv_heads) > share:
        return
    ranges = head_ranges(heads, kv_heads, parts)
    assert [head for first, end in ranges for head in range(first, end)] == list(range(heads))
    for first, end in ranges:
        assert first < end
        assert (first % share == 0 and end % share == 0) or first // share == (end - 1) // share
    assert even_ranges(heads, parts)[-1][1] == heads


def test_dumped_text_shows_the_operators() -> None:
    part = partition(model(), [Stage(0, 1, (0,)), Stage(1, 3, (1, 2))])[1]
    lines = graph_lines(part.graph)
    assert lines[0] == "graph llm.stage1.rank1 {"
    assert {node.op for node in part.graph.nodes} >= {"recv", "replicate", "reduce", "combine"}

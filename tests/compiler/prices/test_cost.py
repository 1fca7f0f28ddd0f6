"""Prices and memory come from the operator records of the cut graph; checked against numbers by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from planning import CONFIGS, ENTRIES, constant, make_device, make_link, make_machine, tiny_profile, with_layers

from flexspec.compiler.artifact.plan import Stage
from flexspec.compiler.artifact.ssm_place import place_named
from flexspec.compiler.partition.lower_ranks import lower_ranks
from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.compiler.prices.acceptance_profile import OFF
from flexspec.compiler.prices.cost import (
    all_gather_us,
    all_reduce_us,
    broadcast_us,
    call_us,
    hop_us,
    interpolate,
    op_us,
    unit_us,
)
from flexspec.compiler.prices.machine import PROCESSORS, NodeKind, Peaks
from flexspec.compiler.prices.memory import Workload, cache_tokens, graph_bytes, rank_bytes
from flexspec.compiler.prices.plan_models import check_same_vocabulary, open_profile
from flexspec.compiler.prices.problem import Problem
from flexspec.compiler.prices.profile import ModelProfile, profile_model, step_sizes
from flexspec.compiler.prices.rounds import Cut, Prices, round_cost
from flexspec.errors import ModelConfigError, PlanError
from flexspec.graph import Graph
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model
from flexspec.text import parse_graph, print_graph
from flexspec.types import PAGE_TOKENS, DType
from flexspec.weight_formats.registry import weight_formats
from repository import ROOT

EXAMPLES = ROOT / "examples" / "configs"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-7b", 6.738e9), ("llama-13b", 13.016e9), ("llama-65b", 65.286e9), ("llama-2-70b", 68.977e9),
     ("opt-13b", 12.85e9), ("opt-30b", 29.97e9), ("opt-125m", 0.125e9), ("llama-68m", 0.068e9),
     ("mixtral-8x7b", 46.703e9)],
)  # fmt: skip
def test_shipped_configurations_have_their_size(name: str, parameters: float) -> None:
    profile = open_profile(EXAMPLES / f"{name}.json", DType.BF16)
    assert profile.weight_bytes() / 2 == pytest.approx(parameters, rel=3e-3)


def test_a_block_at_memory_speed() -> None:
    """One row: weights over bandwidth is nearly all; a product of two ranks has half of it and two all-reduces."""
    profile = open_profile(EXAMPLES / "llama-7b.json", DType.BF16, (2,))
    device, link = make_device(bandwidth=1e12, flops=1e15, launch_us=0.0), make_link(alpha_us=10.0, bandwidth=1e12)
    sizes = step_sizes(1, 1, 32)
    whole = unit_us(device, link, DType.BF16, profile.ranks[1].calls["block"], sizes, 1)
    assert whole == pytest.approx(404.8, rel=0.01)  # 202.4e6 weights of two bytes at 1e12 bytes/s
    half = unit_us(device, link, DType.BF16, profile.ranks[2].calls["block"], sizes, 2)
    assert half == pytest.approx(whole / 2 + 2 * 10.0, rel=0.01)


def test_stored_weights_are_counted_and_read_as_they_are_stored() -> None:
    """float32 activations over float16 matrices: half the bytes of weights, in memory and in time, at any degree."""
    wide, half = (
        open_profile(EXAMPLES / "llama-7b.json", DType.F32, (2,), weights=weights)
        for weights in (None, weight_formats()["f16"])
    )
    vectors = 4 * 4096 * (2 * 32 + 1)
    assert half.weight_bytes() - vectors == (wide.weight_bytes() - vectors) // 2
    device, link = make_device(bandwidth=1e12, flops=1e15, launch_us=0.0), make_link(alpha_us=10.0, bandwidth=1e15)
    sizes = step_sizes(1, 1, 32)
    for degree, reduces in ((1, 0.0), (2, 2 * 10.0)):
        times = [unit_us(device, link, DType.F32, m.ranks[degree].calls["block"], sizes, degree) for m in (wide, half)]
        assert times[1] - reduces == pytest.approx((times[0] - reduces) / 2, rel=0.01)
        assert half.ranks[degree].kv_bytes_per_token == wide.ranks[degree].kv_bytes_per_token


def test_experts_are_priced_by_those_that_are_touched() -> None:
    """One row reads two experts of eight, 64 rows all; two ranks have half of each expert, whoever is chosen."""
    profile = open_profile(EXAMPLES / "mixtral-8x7b.json", DType.BF16, (2, 8))
    device, link = make_device(bandwidth=1e12, flops=1e15, launch_us=0.0), make_link(alpha_us=10.0, bandwidth=1e15)
    expert, rest = 3 * 4096 * 14336, 4096 * (2 * 4096 + 2 * 1024 + 8)
    for rows, touched in ((1, 2.0), (4, 5.47), (64, 8.0)):
        sizes = step_sizes(rows, 1, 32)
        for degree in (1, 2, 8):
            block = unit_us(device, link, DType.BF16, profile.ranks[degree].calls["block"], sizes, degree)
            reduces = 2 * 10.0 if degree > 1 else 0.0
            assert block == pytest.approx(2 * (touched * expert + rest) / degree / 1e6 + reduces, rel=0.04)
    assert "2.0 of 8 for one row, 7.9 for 16" in profile.note


def test_many_rows_at_the_speed_of_arithmetic() -> None:
    profile = open_profile(EXAMPLES / "llama-7b.json", DType.BF16)
    device = make_device(bandwidth=1e15, flops=1e14, launch_us=0.0)
    block = unit_us(device, make_link(), DType.BF16, profile.ranks[1].calls["block"], step_sizes(4096, 1, 32), 1)
    assert block == pytest.approx(2 * 4096 * 202.4e6 / 1e14 * 1e6, rel=0.2)  # attention comes on top


def test_measured_points_override_the_roofline() -> None:
    points = ((10.0, 30.0), (20.0, 40.0))
    assert [interpolate(points, x) for x in (5.0, 10.0, 15.0, 20.0, 40.0)] == [30.0, 30.0, 35.0, 40.0, 80.0]
    device = make_device(bandwidth=1e9, launch_us=1.0)
    calls = tiny_profile("gqa").ranks[1].calls["block"]
    call = next(each for each in calls if each.record.name == "linear_add")
    sizes = step_sizes(1, 1, 32)
    ideal = op_us(device, DType.BF16, call, sizes) - 1.0
    slow = make_device(bandwidth=1e9, launch_us=1.0)
    object.__setattr__(slow, "measured", {"linear_add": ((ideal, 3 * ideal), (2 * ideal, 5 * ideal))})
    assert op_us(slow, DType.BF16, call, sizes) == pytest.approx(3 * ideal + 1.0)


def test_collectives_take_the_best_algorithm() -> None:
    link = make_link(alpha_us=10.0, bandwidth=1e9)  # 1000 bytes a microsecond
    assert all_reduce_us(link, 1e3, 1) == all_gather_us(link, 1e3, 1) == 0.0
    assert all_reduce_us(link, 1e3, 4) == pytest.approx(10 + 3)  # one-shot: everyone to everyone
    assert all_reduce_us(link, 1e6, 4) == pytest.approx(6 * (10 + 250))  # ring
    assert all_gather_us(link, 1e6, 4) == pytest.approx(10 + 750)
    assert broadcast_us(link, 1e3, 5) == pytest.approx(3 * 11)
    near, far = link, make_link(alpha_us=100.0, bandwidth=1e8)
    assert hop_us(far, near, 1e3, 2, 4, shared=True) == pytest.approx(100 + 2 * 10 + 11)
    assert hop_us(near, near, 1e3, 4, 2, shared=False) == pytest.approx(11)


def test_blocks_that_differ_have_no_price(tmp_path: Path) -> None:
    body = json.loads((EXAMPLES / "mixtral-8x7b.json").read_text())
    changes = {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [5], "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(body | changes))
    with pytest.raises(PlanError, match=r"dense layers \(5 \.\.\.\)"):
        open_profile(tmp_path, DType.BF16)


def test_weights_may_have_any_names() -> None:
    """A model is priced by the blocks that its nodes carry, whatever its weights are called."""

    def build(config: ModelConfig, dtype: DType) -> Graph:
        return parse_graph(print_graph(build_model(config, dtype)).replace("%layers.", "%h."))

    config = CONFIGS["gqa"]
    usual, renamed = (
        profile_model("tiny", config, DType.F32, function, degrees=(1, 2)) for function in (build_model, build)
    )
    assert not any("layers" in name for name in renamed.ranks[2].graph.types())
    for degree in (1, 2):
        assert renamed.ranks[degree].calls == usual.ranks[degree].calls
        assert renamed.ranks[degree].weight_bytes == usual.ranks[degree].weight_bytes


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    ranks = tiny_profile("gqa").ranks  # 2 kv heads of 8
    assert [ranks[t].kv_bytes_per_token for t in (1, 2, 4)] == [2 * 2 * 2 * 8, 2 * 2 * 8, 2 * 2 * 8]
    assert tiny_profile("ragged").ranks[2].kv_bytes_per_token == 2 * 2 * 2 * 4  # the larger share of 3 kv heads


def test_memory_is_linear_in_blocks_and_counts_everything() -> None:
    profile, work = with_layers(tiny_profile("mha"), 6), Workload(4, 100, 7)
    device = make_device()
    tables = [rank_bytes(profile, 2, n, work, device, first=True, last=False) for n in (0, 1, 4)]
    assert tables[2].total - tables[0].total == 4 * (tables[1].total - tables[0].total)
    assert cache_tokens(work) == 4 * 128
    assert tables[1].kv == 4 * 128 * profile.ranks[2].kv_bytes_per_token
    rank = profile.ranks[1]
    whole = rank_bytes(profile, 1, 6, work, device, first=True, last=True, ssm=5)
    assert (whole.weights, whole.ssm, whole.reserve) == (profile.weight_bytes(), 5, 1000)
    assert rank.shared_bytes == 2 * 256 * 48  # tied: counted once where both ends meet
    assert whole.tree_scratch >= 4 * 28 * 256
    assert sum(count for _, count in whole.table()[:-2]) == whole.total


@pytest.mark.parametrize("name", ["gqa", "mha", "ragged"])
def test_what_is_planned_is_what_is_served(name: str) -> None:
    """The planner knows a model by two blocks, the server by its whole graph: the bytes are the same."""
    config = replace(CONFIGS[name], layers=5)
    graph = run_passes(build_model(config, DType.BF16), LLM_PASSES)
    for work in (Workload(1, 100, 7), Workload(4, 64, 1), Workload(80, 33, 9)):
        planned = rank_bytes(
            with_layers(tiny_profile(name), 5), 1, 5, work, make_device(), first=True, last=True
        )  # fmt: skip
        served = graph_bytes(graph, {**work.sizes(), "P": cache_tokens(work) // PAGE_TOKENS})
        assert replace(planned, reserve=0, limit=0) == served, work


@pytest.mark.parametrize("name", ["gqa", "mha", "ragged"])
@pytest.mark.parametrize("end", ["first", "last"])
def test_a_rank_that_is_planned_is_the_rank_that_is_served(name: str, end: str) -> None:
    """The same for the largest rank of two stages of degree 2, whose graphs an artifact holds."""
    config = replace(CONFIGS[name], layers=5)
    stages = (Stage(0, 3, (0, 1)), Stage(3, 5, (2, 3)))
    parts = lower_ranks(build_model(config, DType.BF16), stages, LLM_PASSES)
    work, first = Workload(3, 64, 5), end == "first"
    sizes = work.sizes()
    served = [graph_bytes(part.graph, sizes) for part in parts if (part.rank < 2) == first]
    blocks = 3 if first else 2
    planned = rank_bytes(tiny_profile(name), 2, blocks, work, make_device(), first=first, last=not first)
    assert planned.weights == max(each.weights for each in served)
    assert planned.kv == max(each.kv for each in served)
    assert planned.activations >= max(each.activations for each in served)  # the front's and the back's rank differ
    assert planned.activations <= 1.2 * max(each.activations for each in served)


def test_refusal_shows_the_table() -> None:
    small = make_device(memory_bytes=1e4)
    table = rank_bytes(tiny_profile("gqa"), 1, 2, Workload(1, 32, 1), small, first=True, last=True)
    assert not table.fits
    assert "weights 0.00 GB" in str(table.refuse("rank 0 of stage 0"))


@pytest.mark.parametrize("place", ["first", "last", "all", "none"])
def test_most_blocks_is_what_the_memory_function_allows(place: str) -> None:
    llm = with_layers(tiny_profile("gqa"), 40)
    kind = NodeKind(make_device(memory_bytes=1.2e6), 2, make_link(), 1)
    problem = Problem(make_machine(kind), llm, (tiny_profile("ssm", ssm=True),), ENTRIES, 2, 64)
    for first in (False, True):
        most = problem.most_blocks(0, 2, place_named(place), first=first, last=True)
        extra = problem.extra_bytes(place_named(place), first=first, last=True)
        fits = [
            rank_bytes(llm, 2, n, problem.workload, kind.device, first=first, last=True, ssm=extra).fits
            for n in (most, most + 1)
        ]
        assert 0 < most < 40 and fits == [True, False]


def test_impossible_loads_are_refused() -> None:
    machine, llm = make_machine(NodeKind(make_device(), 1, make_link(), 1)), tiny_profile("gqa")
    for requests, context, objective in ((0, 32, "latency"), (1, 257, "latency"), (1, 32, "speed")):
        with pytest.raises(PlanError):
            Problem(machine, llm, (), (), requests, context, objective)


def test_an_ssm_must_share_the_vocabulary() -> None:
    with pytest.raises(ModelConfigError, match="vocabulary of 512"):
        check_same_vocabulary(CONFIGS["mha"], [tiny_profile("gqa")])
    with pytest.raises(ModelConfigError, match="pass it with --ssm"):
        open_profile(ROOT / "ssm" / "smollm2-135m", DType.BF16)


def test_what_a_link_and_an_operator_say_of_themselves() -> None:
    """Rows that travel wider than they are; an operator's own peaks; the join of the logits on CPUs."""
    device, link = make_device(bandwidth=1e9, flops=1e15, launch_us=0.0), make_link(alpha_us=0.0, bandwidth=1e6)
    wide = replace(link, element_bytes=constant(4.0))
    rank = tiny_profile("mha").ranks[2]
    sizes = step_sizes(3, 1, 32)
    block = {call.record.name: call for call in rank.calls["block"]}
    sent = [call_us(device, each, DType.BF16, block["reduce"], sizes, 2) for each in (link, wide)]
    assert sent[1] == pytest.approx(2 * sent[0]) and sent[0] == pytest.approx(3 * 48 * 2)  # [T, E] in bf16, in us
    slow = replace(device, operators={"attention": Peaks(constant(1e8), constant(1e15))})
    times = [op_us(each, DType.BF16, block["attention"], sizes) for each in (device, slow)]
    assert times[1] == pytest.approx(10 * times[0])
    assert op_us(slow, DType.BF16, block["rms_norm"], sizes) == op_us(device, DType.BF16, block["rms_norm"], sizes)
    join = next(call for call in rank.calls["back"] if call.record.name == "combine")
    whole = call_us(device, link, DType.BF16, join, sizes, 2)
    pairs = call_us(replace(device, processor=PROCESSORS["cpu"]), link, DType.BF16, join, sizes, 2)
    assert whole == pytest.approx(3 * 256 * 2 / 2)  # half comes from the other rank
    assert pairs == pytest.approx(3 * 4 * 2 / 2)


def test_the_host_hands_steps_over() -> None:
    """Each stage once, each SSM step with its requests, and once more to tell other ranks."""
    kind = NodeKind(make_device(), 2, make_link(), 1)
    llm, ssm = with_layers(tiny_profile("mha"), 4), tiny_profile("ssm", ssm=True)
    found = []
    for step_us, request_us in ((0.0, 0.0), (100.0, 10.0)):
        machine = replace(make_machine(kind), step_us=constant(step_us), step_request_us=constant(request_us))
        problem = Problem(machine, llm, (ssm,), ENTRIES, 4, 64, degrees=(1, 2))
        costs = []
        for cuts in ((Cut(0, 1, 4, False),), (Cut(0, 1, 2, False), Cut(0, 1, 2, False)), (Cut(0, 2, 4, False),)):
            for place, entry in ((place_named("none"), OFF), (place_named("first"), ENTRIES[0])):
                costs.append(round_cost(Prices(problem, place, entry, 3), cuts).latency_us)
        found.append(costs)
    drafting = 3 * (100 + 3 * 10)  # chain:3 makes three SSM steps
    expected = [100, 100 + drafting, 300, 300 + drafting, 200, 200 + drafting]
    assert [b - a for a, b in zip(*found, strict=True)] == pytest.approx(expected)


def test_states_that_an_ssm_reads_travel_with_the_rows() -> None:
    kind = NodeKind(make_device(), 2, make_link(alpha_us=50.0), 1)
    llm, plain = with_layers(tiny_profile("mha"), 4), tiny_profile("ssm", ssm=True)
    hops = []
    for taps in ((), (1, 3)):
        problem = Problem(make_machine(kind), llm, (replace(plain, taps=taps),), ENTRIES, 4, 64)
        hops.append([Prices(problem, place_named(name), ENTRIES[0], 1).hop_us(0, 1, 1, new_node=False)
                     for name in ("none", "first")])  # fmt: skip
    (off, without), (none, tapped) = hops
    assert off == without == none and tapped == pytest.approx((1 + 3 / 4 + 1 / 4) * without)


@pytest.mark.parametrize(
    ("name", "stages", "messages"),
    [("none", 1, 0), ("none", 2, 1), ("first", 1, 0), ("first", 2, 1), ("last", 1, 0), ("last", 2, 3), ("own", 1, 2),
     ("own", 2, 3), ("all", 1, 2), ("all", 2, 3)],
)  # fmt: skip
@pytest.mark.parametrize("reads", [0, 16])
def test_messages_of_a_round(
    monkeypatch: pytest.MonkeyPatch, name: str, stages: int, messages: int, reads: int
) -> None:
    """Results come back from another last stage; wishes go out and trees come back where another rank drafts.

    What an SSM reads of the LLM's states comes behind the results, and goes on with the wishes.
    """
    monkeypatch.setattr(ModelProfile, "reads_features", property(lambda _: reads))
    llm, cuts = with_layers(tiny_profile("mha"), 4), [Cut(0, 1, 4 // stages, False)] * stages
    found = []
    for alpha_us in (0.0, 1000.0):
        machine = replace(make_machine(NodeKind(make_device(), 3, make_link(alpha_us=alpha_us), 1)), network=None)
        problem = Problem(machine, llm, (tiny_profile("ssm", ssm=True),), ENTRIES, 4, 64)
        found.append(round_cost(Prices(problem, place_named(name), OFF if name == "none" else ENTRIES[0], 3), cuts))
    returned = 1 + (reads > 0 and name != "none") if stages > 1 else 0
    messages += returned - (stages > 1)
    assert found[1].latency_us - found[0].latency_us == pytest.approx(1000 * (stages - 1 + messages))  # hops too
    near, far = (cost.stages[-1].extras.returned_us for cost in found)
    assert far - near == pytest.approx(1000 * (messages if name == "last" else returned))
    if reads and name == "own":
        monkeypatch.setattr(ModelProfile, "reads_features", property(lambda _: 0))
        without = round_cost(Prices(problem, place_named(name), ENTRIES[0], 3), cuts)
        rows = 3 * 1.9 + (ENTRIES[0].rows(3) if stages > 1 else 0)  # chain:3 commits 1.9 tokens
        assert found[1].latency_us - without.latency_us == pytest.approx(
            rows * reads * 2 * 1e6 / 1e9 + 1000 * (stages - 1)
        )


def test_rank_0_is_the_host_and_the_first_stage() -> None:
    """One thread of rank 0 does both: with micro-batches in flight neither overlaps the other."""
    machine = replace(make_machine(NodeKind(make_device(), 2, make_link(), 1)), network=None)
    problem = Problem(machine, with_layers(tiny_profile("mha"), 4), (), (), 4, 64)
    busy = replace(problem, machine=replace(machine, round_us=constant(machine.round_us.effective + 1e6)))
    cuts = [Cut(0, 1, 2, False)] * 2
    plain, slow = (round_cost(Prices(each, place_named("none"), OFF, 2), cuts) for each in (problem, busy))
    assert [stage.stage_us for stage in slow.stages] == pytest.approx([stage.stage_us for stage in plain.stages])
    assert slow.latency_us == pytest.approx(plain.latency_us + 1e6)
    assert slow.bottleneck_us == pytest.approx(slow.stages[0].stage_us + slow.host_us)
    assert slow.period_us(2) == pytest.approx(2 * slow.bottleneck_us)

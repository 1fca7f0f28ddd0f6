"""The search finds the best plan: equal to a separate prover, and never behind what people write by hand."""

from __future__ import annotations

import ast
import math
from dataclasses import replace

import pytest
from planning import ENTRIES, make_device, make_link, make_machine, random_problem, tiny_profile, with_layers

from flexspec.compiler.artifact.ssm_place import FirstStage, NoSsm
from flexspec.compiler.planner.plan_choice import best_choice, ladder, least_free_bytes, make_plan, uniform_plans
from flexspec.compiler.planner.prove import prove
from flexspec.compiler.planner.search import Candidate, pareto_front, search
from flexspec.compiler.planner.stage_program import StageProgram
from flexspec.compiler.prices.acceptance_profile import open_acceptance
from flexspec.compiler.prices.machine import NodeKind, open_machine, shipped_machines
from flexspec.compiler.prices.plan_models import open_profile
from flexspec.compiler.prices.problem import Problem
from flexspec.compiler.prices.rounds import Cut, Prices, round_cost
from flexspec.errors import PlanError
from flexspec.types import DType
from repository import ROOT, parsed

CONFIGS = ROOT / "examples" / "configs"
CASES, PER_TEST = 360, 60


def best_or_none(problem: Problem) -> Candidate | None:
    try:
        return search(problem)[0]
    except PlanError:
        return None


@pytest.mark.slow(reason="360 problems, whose plans are all enumerated: 45 s of processor time together")
@pytest.mark.parametrize("start", range(0, CASES, PER_TEST))
def test_search_equals_the_prover(start: int) -> None:
    found = 0
    for seed in range(start, start + PER_TEST):
        problem = random_problem(seed)
        best = best_or_none(problem)
        proof = prove(problem, best.value_us if best else math.inf)
        assert proof.method == "enumeration", seed
        assert (best.value_us if best else math.inf) == pytest.approx(proof.best_us, rel=1e-9), seed
        if best:
            found += 1
            cost = round_cost(Prices(problem, best.place, best.entry, best.micro), best.cuts)
            assert cost.period_us(best.micro_batches) == pytest.approx(best.period_us, rel=1e-9), seed
            assert sum(cut.blocks for cut in best.cuts) == problem.llm.blocks
            # Of all plans of this value none leaves more memory free, and what is told of the plan is so.
            assert proof.free_bytes == best.free_bytes >= 0, seed
            assert not proof.refutes(best.value_us, best.free_bytes)
            assert proof.refutes(best.value_us * 1.01, best.free_bytes)
            assert proof.refutes(best.value_us, best.free_bytes - 1)
            assert least_free_bytes(problem, best.place, best.cuts) == best.free_bytes, seed
            assert best_choice(problem, best.place, best.cuts).value_us == pytest.approx(best.value_us)  # type: ignore[union-attr]
            check_devices(problem, best)
    assert found > PER_TEST // 3


@pytest.mark.slow(reason="80 problems, seven searches each")
def test_a_solver_forgets_what_lay_above_the_ceiling() -> None:
    """What a tight ceiling let through by chance must not stand for the least under a wider one."""
    from flexspec.compiler.planner import search as searching

    for seed in range(80):
        problem = random_problem(seed)
        for place in problem.places():
            space = searching._PlaceSearch(problem, place, problem.legal_degrees)
            prices = (problem.entries_at(place)[0], problem.requests)
            least, cuts = searching._LatencySolver(space, *prices).latency(math.inf, math.inf)
            used = searching._LatencySolver(space, *prices)
            for part in (0.5, 0.9, 0.99, 0.999, 1.0):
                assert used.latency(math.inf, least * part) == (math.inf, ()), seed
            assert used.latency(math.inf, math.inf) == (least, cuts), seed


def test_equal_times_leave_the_most_memory() -> None:
    """Two stages that one device cannot hold: every split takes the same time, the roomiest is taken."""
    llm = with_layers(tiny_profile("gqa"), 9)
    none, kind = NoSsm(), NodeKind(make_device(), 2, make_link(), 1)
    roomy = Problem(make_machine(kind), llm, (), (), 1, 64, degrees=(1,))
    memory = max(roomy.stage_bytes(0, 1, 7, none, first=end, last=not end).total for end in (True, False))
    problem = replace(roomy, machine=make_machine(replace(kind, device=make_device(memory_bytes=memory))))
    best = search(problem)[0]
    splits = {n: (Cut(0, 1, n, False), Cut(0, 1, 9 - n, False)) for n in range(1, 9)}
    fit = {n: free for n, cuts in splits.items() if (free := least_free_bytes(problem, none, cuts)) >= 0}
    values = [best_choice(problem, none, splits[n]).value_us for n in fit]  # type: ignore[union-attr]
    assert len(fit) > 2 and values == pytest.approx([best.value_us] * len(fit), rel=1e-12)
    assert best.free_bytes == max(fit.values()) > sorted(fit.values())[0]


def check_devices(problem: Problem, best: Candidate) -> None:
    """The plan's devices: each once, a stage inside a node, neighbours on one node where the search said so."""
    plan = make_plan(problem, best)
    assert len(set(plan.devices)) == len(plan.devices) and max(plan.devices) < problem.machine.devices
    nodes = [{problem.machine.device_node(plan.devices[rank]) for rank in stage.ranks} for stage in plan.stages]
    kinds = problem.machine.node_kinds()
    for i, cut in enumerate(best.cuts):
        assert len(nodes[i]) == 1 and kinds[min(nodes[i])] is problem.kind(cut.kind)
        assert i == 0 or (nodes[i] != nodes[i - 1]) == cut.new_node
    if best.place.separate:
        used = {rank for stage in plan.stages for rank in stage.ranks}
        assert not used & {rank for ranks in plan.ssm_ranks for rank in ranks}


@pytest.mark.slow(reason="60 problems, each searched twice and bounded three times")
def test_branch_and_bound_agrees_with_enumeration() -> None:
    from flexspec.compiler.planner import prove as prover

    for seed in range(60):
        problem = random_problem(seed)
        best = best_or_none(problem)
        if best is None:
            continue
        spaces = [prover._Space(problem, place) for place in problem.places()]
        for incumbent in (best.value_us, best.value_us * 1.5):
            done = prover._branch_and_bound(spaces, 0, 0, incumbent, 50_000)
            assert done.proven and done.best_us == pytest.approx(best.value_us, rel=1e-9), seed
        early = prover._branch_and_bound(spaces, 0, 0, best.value_us * 1.5, 1)
        assert early.bound_us <= best.value_us * (1 + 1e-9), seed


def shipped_problem(name: str, model: str, objective: str, requests: int = 8) -> Problem:
    machine = open_machine(name)
    degrees = tuple(d for d in (1, 2, 4, 8) if d <= max(kind.devices for kind in machine.kinds))
    llm = open_profile(CONFIGS / f"{model}.json", DType.BF16, degrees)
    ssm = open_profile(CONFIGS / "llama-68m.json", DType.BF16, ssm=True)
    entries = open_acceptance("specinfer-llama-7b").entries
    return Problem(machine, llm, (ssm,), entries, requests, 512, objective, degrees=degrees)


UNIFORM = [(name, model) for name in shipped_machines() for model in ("llama-7b", "llama-65b") if name != "h100x64"]
WIDE = pytest.param("h100x64", "llama-65b", marks=pytest.mark.slow(reason="64 devices: 10 to 18 s of processor time"))


@pytest.mark.slow(reason="every shipped machine with two models: 20 s together")
@pytest.mark.parametrize(("name", "model"), [*UNIFORM, WIDE])
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_never_worse_than_uniform_plans(name: str, model: str, objective: str) -> None:
    problem = shipped_problem(name, model, objective)
    best, by_hand = best_or_none(problem), uniform_plans(problem)
    assert (best is None) <= (not by_hand)
    if best and by_hand:
        assert best.value_us <= by_hand[0].value_us * (1 + 1e-9)


@pytest.mark.slow(reason="searches 64 devices")
@pytest.mark.parametrize(("name", "requests", "programs"), [("h100x8", 16, 200), ("h100x64", 64, 250)])
def test_bounds_leave_few_programs_to_solve(
    monkeypatch: pytest.MonkeyPatch, name: str, requests: int, programs: int
) -> None:
    """80 blocks: 146 and 184 dynamic programs over stages, which is where a search's time goes."""
    solved = 0
    solve = StageProgram.solve

    def counted(program: StageProgram) -> tuple[float, tuple[Cut, ...]]:
        nonlocal solved
        solved += 1
        return solve(program)

    monkeypatch.setattr(StageProgram, "solve", counted)
    search(shipped_problem(name, "llama-2-70b", "throughput", requests))
    assert 0 < solved <= programs


def test_a_thousand_devices() -> None:
    kind = NodeKind(make_device(memory_bytes=3e5), 8, make_link(), 125)
    problem = Problem(make_machine(kind), with_layers(tiny_profile("gqa"), 12), (), (), 1, 64, degrees=(1, 2, 4))
    best = search(problem)[0]
    assert problem.machine.devices == 1000 and sum(cut.blocks for cut in best.cuts) == 12


def test_a_device_too_small_for_a_layer() -> None:
    kind = NodeKind(make_device(memory_bytes=2e4), 4, make_link(), 1)
    problem = Problem(make_machine(kind), tiny_profile("gqa"), (), (), 1, 64)
    with pytest.raises(PlanError, match="no plan of gqa on test fits.*weights.*kv.*device has"):
        search(problem)


def test_a_limit_nobody_meets_is_named() -> None:
    problem = replace(shipped_problem("a10", "llama-7b", "latency"), objective="goodput", limit_us=1.0)
    with pytest.raises(PlanError, match="on a10 fits: weights"):
        search(replace(problem, requests=4000))  # it is the memory that refuses this one
    with pytest.raises(PlanError, match=r"ms a token at best; expected a limit that some plan meets, not 0.001 ms"):
        search(problem)


@pytest.mark.slow(reason="searches twice")
def test_goodput_keeps_the_limit() -> None:
    free = search(shipped_problem("h100x8", "llama-13b", "throughput", 32))[0]
    limit_us = free.per_token_us * 0.7
    problem = replace(shipped_problem("h100x8", "llama-13b", "throughput", 32), objective="goodput", limit_us=limit_us)
    best = search(problem)[0]
    assert best.per_token_us <= limit_us and best.tokens_per_s <= free.tokens_per_s


@pytest.mark.slow(reason="searches a front")
def test_front_has_no_dominated_plan() -> None:
    problem = shipped_problem("a10x4x2", "llama-65b", "throughput", 4)
    front = pareto_front(problem)
    for each in front:  # none is slower than a plan of the same value that leaves more memory free
        assert each.free_bytes == least_free_bytes(problem, each.place, each.cuts) >= 0
    fastest = search(replace(problem, objective="latency", requests=front[0].batch))[0]
    assert front[0].per_token_us == pytest.approx(fastest.per_token_us, rel=1e-9)
    for before, after in zip(front, front[1:], strict=False):
        assert after.per_token_us > before.per_token_us * (1 + 1e-9)
        assert before.per_token_us < after.per_token_us and before.tokens_per_s < after.tokens_per_s
    assert front[-1].tokens_per_s == pytest.approx(search(problem)[0].tokens_per_s)


def test_wide_batches_take_smaller_trees_and_off_may_win() -> None:
    kind = NodeKind(make_device(flops=2e9), 1, make_link(), 1)  # so little arithmetic that every row costs
    problem = Problem(make_machine(kind), tiny_profile("gqa"), (tiny_profile("ssm", ssm=True),), ENTRIES, 8, 64)
    rungs = ladder(problem, FirstStage(), search(problem, places=[FirstStage()])[0].cuts)
    assert [rung.batch for rung in rungs] == [1, 2, 4, 8]
    assert rungs[-1].entry.draft.method == "off"


def test_prover_does_not_know_the_search() -> None:
    """Nothing of its room, where the search lives, and whatever the prover imports does not either."""
    planner = "flexspec.compiler.planner."
    seen, wanted = set(), [f"{planner}prove"]
    while wanted:
        module = wanted.pop()
        path = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")  # flexspec.compiler is ROOT/compiler
        if module in seen or not module.startswith("flexspec.compiler.") or not path.is_file():
            continue
        seen.add(module)
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                wanted += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                wanted += [alias.name for alias in node.names]
    assert {module for module in seen if module.startswith(planner)} == {f"{planner}prove"}
    assert "flexspec.compiler.prices.rounds" in seen, "the walk sees imports"

"""Prices a hand-written plan: its devices become cuts and an SSM place of the problem, or it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flexspec.compiler.artifact.plan import Plan, check_blocks
from flexspec.compiler.artifact.ssm_place import FirstStage, NoSsm, SeparateDevices, SsmPlace
from flexspec.compiler.planner.plan_choice import (
    Layout,
    best_choice,
    ladder,
    make_plan,
    plan_bytes,
    predicted_figures,
    ssm_devices,
)
from flexspec.compiler.planner.plan_file import FIX, HandPlan, read_plan, wrong
from flexspec.compiler.planner.search import Candidate
from flexspec.compiler.prices.problem import Problem
from flexspec.compiler.prices.rounds import Cut
from flexspec.errors import PlanError


def score_plan(problem: Problem, plan: HandPlan) -> Candidate:
    """The plan's price. Raises PlanError for invalid stages, CapacityError for a rank that does not fit."""
    place, cuts = _place(problem, plan), stage_cuts(problem, plan)
    if place not in problem.places():
        room = ", ".join(dict.fromkeys(known.name for known in problem.places()))
        raise wrong(f"{plan.source}: ssm = {place.name!r}", f"a place with room for the SSMs: {room}")
    for i, (cut, memory) in enumerate(zip(cuts, plan_bytes(problem, place, cuts), strict=True)):
        if not memory.fits:
            device = problem.kind(cut.kind).device.name
            raise memory.refuse(
                f"{plan.source}: a rank of stage {i} ({cut.blocks} blocks, degree {cut.degree}, {device})"
            )
    offered = problem.offered_at(place)
    entries = [entry for entry in offered if plan.draft in (None, entry.draft)]
    if not entries:
        known = ", ".join(str(entry.draft) for entry in offered)
        raise wrong(f"{plan.source}: draft: {str(plan.draft)!r}", f"one of the acceptance profile: {known}")
    batch = plan.batch or problem.requests
    if batch > problem.requests:
        expected = f"at most {problem.requests}, the requests planned for"
        raise PlanError(f"{plan.source}: batch {batch}", expected, "pass --requests")
    if (plan.micro_batches or 1) > batch:
        raise wrong(f"{plan.source}: {plan.micro_batches} micro-batches of {batch} requests", "at most one per request")
    candidate = best_choice(problem, place, cuts, entries, plan.batch, plan.micro_batches)
    if candidate is None:
        expected = f"at most {problem.limit_us:g} us a token"
        raise PlanError(f"{plan.source}: a plan that misses the limit", expected, "loosen --limit-ms")
    return candidate


def priced_plan(problem: Problem, path: Path, plan: HandPlan, candidate: Candidate) -> Plan:
    """The plan of file ``path`` with its price, for writing: on the devices and with the drafting that it names.

    A JSON plan keeps its ladder; a TOML plan gets one within what it fixes.
    """
    if path.suffix == ".json":
        original = read_plan(path, len(problem.ssms), candidate.entry.draft)
        return replace(original, machine=problem.machine.name, predicted=predicted_figures(candidate), certificate=())
    rungs = ladder(problem, candidate.place, candidate.cuts, draft=plan.draft, micro_batches=plan.micro_batches)
    return make_plan(problem, candidate, None, "hand", hand_layout(problem, plan, candidate.place), rungs)


def hand_layout(problem: Problem, plan: HandPlan, place: SsmPlace) -> Layout:
    """The devices that the plan names."""
    stages = tuple(devices for _, devices in plan.stages)
    if place.separate:
        return Layout(stages, tuple((device,) for device in plan.ssm_devices))
    return Layout(stages, ssm_devices(problem, place, stages))


def stage_cuts(problem: Problem, plan: HandPlan) -> tuple[Cut, ...]:
    """The stages as cuts. A node is entered only once: the search space has no plans that return to one."""
    machine = problem.machine

    def invalid(key: str, found: str, expected: str) -> PlanError:
        return wrong(f"{plan.source}: {key}: {found}", expected)

    check_blocks(plan.blocks, problem.llm.blocks, invalid)
    for device in (*(device for _, devices in plan.stages for device in devices), *plan.ssm_devices):
        if device >= machine.devices:
            raise wrong(f"{plan.source}: device {device}", f"0 to {machine.devices - 1}, the machine's devices")
    cuts: list[Cut] = []
    seen: list[int] = []
    for i, (blocks, devices) in enumerate(plan.stages):
        nodes = {machine.device_node(device) for device in devices}
        if len(nodes) > 1:
            stage = f"{plan.source}: stage {i} on devices {list(devices)} of {len(nodes)} nodes"
            raise wrong(stage, "devices of one node")
        node, degree = nodes.pop(), len(devices)
        if degree not in problem.llm.ranks:
            reason = problem.llm.refused.get(degree, f"one of {', '.join(map(str, sorted(problem.llm.ranks)))}")
            stage = f"{plan.source}: stage {i} of degree {degree}"
            raise PlanError(stage, reason, "pass --degrees with it, or choose another")
        if node in seen[:-1]:
            raise wrong(f"{plan.source}: stage {i} returns to node {node}", "consecutive stages on a node")
        new_node = bool(seen) and node != seen[-1]
        cuts.append(Cut(machine.node_kind(node), degree, blocks, new_node))
        if not seen or new_node:
            seen.append(node)
    return tuple(cuts)


def _place(problem: Problem, plan: HandPlan) -> SsmPlace:
    place = plan.place or (FirstStage() if problem.ssms else NoSsm())
    if place.drafts and not problem.drafting:
        raise PlanError(f"{plan.source}: ssm = {place.name!r} and no SSM", "an SSM to place", f"pass --ssm, or {FIX}")
    if not place.separate:
        return place
    if len(plan.ssm_devices) != len(problem.ssms):
        devices = f"{plan.source}: ssm_devices {list(plan.ssm_devices)}"
        raise wrong(devices, f"one device for each of {len(problem.ssms)} SSMs")
    machine = problem.machine
    inside = [device for device in plan.ssm_devices if device < machine.devices]
    nodes = {machine.device_node(device) for device in inside}
    if len(nodes) != 1:
        raise wrong(f"{plan.source}: ssm_devices {list(plan.ssm_devices)}", "devices of one node of the machine")
    return SeparateDevices(machine.node_kind(nodes.pop()))

"""Hand-written plans: a TOML file becomes cuts and an SSM place that can be priced, or a typed error."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexspec.compiler.acceptance_profile import OFF, DraftEntry
from flexspec.compiler.plan_choice import best_choice, least_free_bytes, plan_bytes
from flexspec.compiler.problem import PLACES, Problem, SsmPlace
from flexspec.compiler.rounds import Cut, Prices, micro_batch_counts, round_cost, value_us
from flexspec.compiler.search import Candidate
from flexspec.errors import PlanError

_KEYS = {"ssm", "ssm_devices", "draft", "batch", "micro_batches", "stages"}
_FIX = "correct the plan file"


@dataclass(frozen=True, slots=True)
class HandPlan:
    """Stages as (blocks, devices); ``draft``, ``batch`` and ``micro_batches`` are chosen by the model where None."""

    place: SsmPlace
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    draft: str | None
    batch: int | None
    micro_batches: int | None


def read_plan(path: Path, problem: Problem) -> HandPlan:
    """The plan of a TOML file, its devices being those of the problem's machine. Raises PlanError."""
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"{path}: {error}", "a plan as TOML", _FIX) from None
    unknown = sorted(set(body) - _KEYS)
    if unknown:
        raise PlanError(f"{path.name}: unknown key {unknown[0]}", f"only {', '.join(sorted(_KEYS))}", _FIX)
    stages = tuple(_stage(path, item) for item in _list(path, body, "stages"))
    held = tuple(device for _, devices in stages for device in devices)
    place, own = _place(path, body, problem)
    used = (*held, *own)
    if len(set(used)) < len(used):
        raise PlanError(f"{path.name}: a device twice in {list(used)}", "each device in one place", _FIX)
    for device in used:
        if not 0 <= device < problem.machine.devices:
            expected = f"0 to {problem.machine.devices - 1}, the machine's devices"
            raise PlanError(f"{path.name}: device {device}", expected, _FIX)
    if sum(blocks for blocks, _ in stages) != problem.llm.blocks:
        found = f"{path.name}: stages of {sum(blocks for blocks, _ in stages)} blocks"
        raise PlanError(found, f"{problem.llm.blocks}, the model's", _FIX)
    draft = body.get("draft")
    if draft is not None and draft not in [entry.draft for entry in (OFF, *problem.entries)]:
        known = ", ".join(entry.draft for entry in (OFF, *problem.entries))
        raise PlanError(f"{path.name}: draft {draft!r}", f"one of the acceptance profile: {known}", _FIX)
    return HandPlan(place, stages, draft, _count(path, body, "batch"), _count(path, body, "micro_batches"))


def score_plan(problem: Problem, plan: HandPlan) -> Candidate:
    """The plan's price. Raises PlanError for stages that cannot be, CapacityError with the bytes of a rank too full."""
    cuts = _cuts(problem, plan)
    for i, (cut, held) in enumerate(zip(cuts, plan_bytes(problem, plan.place, cuts), strict=True)):
        if not held.fits:
            device = problem.kind(cut.kind).device.name
            raise held.refuse(f"a rank of stage {i} ({cut.blocks} blocks, degree {cut.degree}, {device})")
    if plan.draft is None and plan.batch is None and plan.micro_batches is None:
        found = best_choice(problem, plan.place, cuts)
    else:
        found = _chosen(problem, plan, cuts)
    if found is None:
        raise PlanError("a plan that misses the limit", f"at most {problem.limit_us:g} us a token", "loosen --limit-ms")
    return found


def _chosen(problem: Problem, plan: HandPlan, cuts: tuple[Cut, ...]) -> Candidate | None:
    batch = plan.batch or problem.requests
    if batch > problem.requests:
        raise PlanError(f"batch {batch}", f"at most {problem.requests}, the requests planned for", "pass --requests")
    if (plan.micro_batches or 1) > batch:
        raise PlanError(f"{plan.micro_batches} micro-batches of {batch} requests", "at most one a request", _FIX)
    entries: list[DraftEntry] = [e for e in (OFF, *problem.drafting) if plan.draft in (None, e.draft)]
    free_bytes = least_free_bytes(problem, plan.place, cuts)
    best: Candidate | None = None
    for entry in entries:
        for count in [plan.micro_batches] if plan.micro_batches else micro_batch_counts(batch):
            period = round_cost(Prices(problem, plan.place, entry, -(-batch // count)), cuts).period_us(count)
            value = value_us(problem, entry, batch, period)
            each = Candidate(value, period, plan.place, entry, batch, count, cuts, free_bytes)
            best = each if best is None or each.value_us < best.value_us else best
    return best if best and best.value_us < float("inf") else None


def _cuts(problem: Problem, plan: HandPlan) -> tuple[Cut, ...]:
    kinds = problem.machine.node_kinds()
    cuts: list[Cut] = []
    before = -1
    for i, (blocks, devices) in enumerate(plan.stages):
        nodes = {problem.machine.device_node(device) for device in devices}
        if len(nodes) > 1:
            raise PlanError(f"stage {i} on devices {list(devices)} of {len(nodes)} nodes", "devices of one node", _FIX)
        node, degree = nodes.pop(), len(devices)
        if degree not in problem.llm.ranks:
            reason = problem.llm.refused.get(degree, f"one of {', '.join(map(str, sorted(problem.llm.ranks)))}")
            raise PlanError(f"stage {i} of degree {degree}", reason, "pass --degrees with it, or choose another")
        cuts.append(Cut(problem.machine.kinds.index(kinds[node]), degree, blocks, i > 0 and node != before))
        before = node
    return tuple(cuts)


def _place(path: Path, body: Mapping[str, Any], problem: Problem) -> tuple[SsmPlace, tuple[int, ...]]:
    name = body.get("ssm", "first" if problem.ssms else "none")
    if name not in PLACES or (name != "none" and not problem.ssms):
        raise PlanError(f"{path.name}: ssm = {name!r}", f"one of {', '.join(PLACES)}, and an --ssm", _FIX)
    own = _devices(path, body.get("ssm_devices", []))
    if (name == "own") != bool(own) or (own and len(own) != len(problem.ssms)):
        raise PlanError(f"{path.name}: ssm_devices {list(own)}", 'a device for each SSM with ssm = "own"', _FIX)
    if name != "own":
        return SsmPlace(str(name)), ()
    kind = problem.machine.node_kinds()[problem.machine.device_node(own[0])]
    return SsmPlace("own", problem.machine.kinds.index(kind)), own


def _list(path: Path, body: Mapping[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    if not isinstance(value, list) or not value:
        raise PlanError(f"{path.name}: {key} = {value!r}", f"one or more [[{key}]] tables", _FIX)
    return value


def _stage(path: Path, item: Any) -> tuple[int, tuple[int, ...]]:
    if not isinstance(item, dict) or set(item) != {"blocks", "devices"}:
        raise PlanError(f"{path.name}: stage {item!r}", "blocks and devices", _FIX)
    blocks, devices = item["blocks"], _devices(path, item["devices"])
    if type(blocks) is not int or blocks < 1 or not devices:
        raise PlanError(f"{path.name}: stage {item!r}", "a block or more, on a device or more", _FIX)
    return blocks, devices


def _devices(path: Path, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise PlanError(f"{path.name}: devices {value!r}", "a list of device numbers", _FIX)
    return tuple(value)


def _count(path: Path, body: Mapping[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise PlanError(f"{path.name}: {key} = {value!r}", "a whole number from 1 up", _FIX)
    return value

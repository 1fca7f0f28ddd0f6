"""Plan files for ``flexspec compile --plan``: JSON as ``flexspec plan -o`` writes it, or TOML by hand.

Owns reading them, and the check that a plan can be run as it stands. Prices play no part here.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexspec.compiler.plan import MOST_MICRO_BATCHES, Plan, Stage, plan_from_json
from flexspec.errors import PlanError

_FIX = "correct the plan file"
_TOML_KEYS = ("ssm", "ssm_devices", "draft", "batch", "micro_batches", "stages")
_OPEN = 1 << 30


def read_plan_file(path: Path, ssms: int, draft: str) -> Plan:
    """The plan of a file; ``draft`` stands in its ladder if a TOML file names none. Raises PlanError, ArtifactError."""
    try:
        text = path.read_text(encoding="utf-8")
        body = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:  # both decoders' errors are ValueErrors
        raise PlanError(f"{path}: {error}", "a plan as JSON (flexspec plan -o) or TOML", _FIX) from None
    if not isinstance(body, dict):
        raise PlanError(f"{path}: a {type(body).__name__}", "a table", _FIX)
    return _from_toml(path, body, ssms, draft) if path.suffix == ".toml" else plan_from_json(body)


def _from_toml(path: Path, body: Mapping[str, Any], ssms: int, draft: str) -> Plan:
    """Devices become ranks in the order in which the stages name them."""
    unknown = sorted(set(body) - set(_TOML_KEYS))
    if unknown:
        raise PlanError(f"{path.name}: unknown key {unknown[0]}", f"only {', '.join(_TOML_KEYS)}", _FIX)
    stages: list[Stage] = []
    devices: list[int] = []
    try:
        for item in body["stages"]:
            first, held = stages[-1].end_block if stages else 0, [int(device) for device in item["devices"]]
            stages.append(
                Stage(first, first + int(item["blocks"]), tuple(range(len(devices), len(devices) + len(held))))
            )
            devices += held
        micro_batches = (int(body["micro_batches"]),) if "micro_batches" in body else ()
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{path.name}: stages ({error!r})", "[[stages]] with blocks and devices", _FIX) from None
    if not stages or len(set(devices)) < len(devices):
        raise PlanError(f"{path.name}: devices {devices}", "one or more stages, each device once", _FIX)
    ladder = ((_OPEN, str(body.get("draft", draft))),)
    place = str(body.get("ssm", "first" if ssms else "none"))
    ssm_ranks, devices = _ssm_ranks(path, body, place, stages, devices, ssms)
    return Plan(
        tuple(stages), ssm_ranks, ladder, "hand", tuple(devices), micro_batches, "" if place == "none" else place
    )


def _ssm_ranks(
    path: Path, body: Mapping[str, Any], place: str, stages: list[Stage], devices: list[int], ssms: int
) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """Ranks of each SSM, and the devices of all ranks: SSMs on devices of their own have ranks behind the stages'."""
    first, last = stages[0].ranks[0], stages[-1].ranks[0]
    if place in ("none", "first"):
        return ((first,),) * ssms, devices
    if place == "last":
        return ((last,),) * ssms, devices
    if place == "all":
        return (tuple(range(len(devices))),) * ssms, devices
    own = body.get("ssm_devices", ())
    if place != "own" or not isinstance(own, list) or len(own) != ssms or len({*own, *devices}) < ssms + len(devices):
        raise PlanError(
            f"{path.name}: ssm = {place!r}, ssm_devices = {own}",
            f"none, first, last, all, or own with ssm_devices: {ssms} devices that no stage has",
            _FIX,
        )
    return tuple((len(devices) + i,) for i in range(ssms)), [*devices, *map(int, own)]


def check_runnable(plan: Plan, blocks: int, ssms: int) -> None:
    """Raise PlanError for a plan that does not fit the model, or that no ranks can run."""
    held = sorted(rank for stage in plan.stages for rank in stage.ranks)
    every = sorted({*held, *(rank for ranks in plan.ssm_ranks for rank in ranks)})
    if len(set(held)) < len(held) or every != list(range(len(every))) or 0 not in held:
        raise PlanError(
            f"a plan with ranks {held} in its stages, {list(plan.ssm_ranks)} for its SSMs",
            "each rank in one stage at most, rank 0 in one, and none left out",
            _FIX,
        )
    if plan.stages[-1].end_block != blocks:
        raise PlanError(f"a plan of {plan.stages[-1].end_block} blocks", f"{blocks}, the model's", "plan this model")
    if len(plan.ssm_ranks) != ssms:
        raise PlanError(f"a plan for {len(plan.ssm_ranks)} SSMs", f"{ssms}, as many as --ssm names", _FIX)
    if any(not ranks or len(set(ranks)) < len(ranks) for ranks in plan.ssm_ranks):
        raise PlanError(f"SSMs on ranks {list(plan.ssm_ranks)}", "one or more ranks for each, each once", _FIX)
    if any(not 1 <= count <= MOST_MICRO_BATCHES for count in plan.micro_batches):
        raise PlanError(f"micro-batches {list(plan.micro_batches)}", f"1 to {MOST_MICRO_BATCHES} each", _FIX)

"""Plan files for ``flexspec compile --plan``: JSON as ``flexspec plan -o`` writes it, or TOML by hand.

Owns reading them, and the check that a plan can be run as it stands. Prices play no part here.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexspec.compiler.plan import Plan, Stage, plan_from_json
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
    place = str(body.get("ssm", "first" if ssms else "none"))
    ssm_ranks = tuple((0,) for _ in range(ssms)) if place in ("first", "none") else ((-1,),) * ssms
    ladder = ((_OPEN, str(body.get("draft", draft))),)
    return Plan(
        tuple(stages), ssm_ranks, ladder, "hand", tuple(devices), micro_batches, "" if place == "none" else place
    )


def check_runnable(plan: Plan, blocks: int, ssms: int) -> None:
    """Raise PlanError for a plan that does not fit the model, or that ranks cannot run yet."""
    ranks = sorted(rank for stage in plan.stages for rank in stage.ranks)
    if ranks != list(range(len(ranks))):
        raise PlanError(f"a plan with ranks {ranks} in its stages", f"each of 0 to {len(ranks) - 1} once", _FIX)
    if plan.stages[-1].end_block != blocks:
        raise PlanError(f"a plan of {plan.stages[-1].end_block} blocks", f"{blocks}, the model's", "plan this model")
    if len(plan.ssm_ranks) != ssms:
        raise PlanError(f"a plan for {len(plan.ssm_ranks)} SSMs", f"{ssms}, as many as --ssm names", _FIX)
    if any(each != (0,) for each in plan.ssm_ranks):
        raise PlanError(
            f"SSMs in the place {plan.ssm_place or list(plan.ssm_ranks)}",
            "SSMs on rank 0: other places can be planned, not run yet",
            'give them rank 0 alone ("ssm_ranks": [[0]], in TOML ssm = "first")',
        )
    if any(count > 1 for count in plan.micro_batches):
        raise PlanError(
            f"{max(plan.micro_batches)} micro-batches in flight",
            "one: more can be planned, not run yet",
            "leave micro_batches out of the plan",
        )

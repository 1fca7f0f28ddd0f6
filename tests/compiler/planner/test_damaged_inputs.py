"""Machine files, acceptance profiles and plans with every value replaced by odd ones: typed errors or sound results."""

from __future__ import annotations

import copy
import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planning import ENTRIES, make_device, make_link, make_machine, tiny_profile, with_layers

from flexspec.checked_table import Table
from flexspec.compiler.artifact.plan import plan_from_json
from flexspec.compiler.artifact.ssm_place import FirstStage
from flexspec.compiler.planner.plan_choice import make_plan
from flexspec.compiler.planner.plan_file import check_runnable, read_hand_plan, read_plan
from flexspec.compiler.planner.score_plan import score_plan
from flexspec.compiler.planner.search import search
from flexspec.compiler.prices.acceptance_profile import PROFILES, open_acceptance, read_acceptance, wrong
from flexspec.compiler.prices.machine import MACHINES, NodeKind, read_machine
from flexspec.compiler.prices.problem import Problem
from flexspec.draft_plan import DraftPlan
from flexspec.errors import FlexspecError, MachineError

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3.5, -0.0, 1e-320, 1e300, 10**40, 10**400, math.nan, math.inf, -math.inf, "", "x", "0",
    "\x00", [], [[]], [None], {}, {"x": 1}, [1, 1], [-1], [0.5], [10**40],
)  # fmt: skip


def places(body: Any) -> Iterator[list[Any]]:
    """Paths of keys to everything in a body."""
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in items:
        yield [key]
        yield from ([key, *path] for path in places(value))


def changed(body: Any) -> Iterator[tuple[str, Any]]:
    """The body with each value replaced by odd ones, with each key left out, and with a key too many."""
    for path in places(body):
        for odd in ODD:
            made = copy.deepcopy(body)
            inside = made
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = odd
            yield f"{path} = {odd!r:.40}", made
        made = copy.deepcopy(body)
        inside = made
        for key in path[:-1]:
            inside = inside[key]
        if isinstance(inside, dict):
            del inside[path[-1]]
            yield f"{path} left out", made
            yield f"{path} misspelt", {**copy.deepcopy(body), "colour": 1}


@pytest.mark.slow(reason="hundreds of damaged files")
def test_machine_files() -> None:
    def fail(found: str, expected: str) -> MachineError:
        return MachineError(found, expected, "correct the machine file")

    body = tomllib.loads((MACHINES / "a10x4x2.toml").read_text())
    problem = small_problem()
    refused = 0
    for what, each in changed(body):
        try:
            machine = read_machine(Table(each, "m.toml", fail))
        except FlexspecError as error:
            assert "m.toml: " in str(error), what
            refused += 1
            continue
        if machine.devices > 8:
            continue  # sound, and large
        best = search(replace(problem, machine=machine), places=[FirstStage()])[0]
        assert 0 < best.value_us < math.inf, what
    assert refused > 800


def small_problem() -> Problem:
    machine = make_machine(NodeKind(make_device(memory_bytes=1e9), 4, make_link(), 2))
    llm = with_layers(tiny_profile("mha"), 6)
    return Problem(machine, llm, (tiny_profile("ssm", ssm=True),), ENTRIES, 4, 64, degrees=(1, 2, 4))


@pytest.mark.slow(reason="hundreds of damaged files")
def test_acceptance_profiles() -> None:
    body = json.loads((PROFILES / "smollm2-135m.json").read_text())
    body["entries"] = [{**body["entries"][0], "most_nodes": 4, "ssm_rows": [2.0]}]
    refused = 0
    for what, each in changed(body):
        try:
            profile = read_acceptance(Table(each, "p.json", wrong), "p")
        except FlexspecError as error:
            assert "acceptance profile p.json: " in str(error), what
            refused += 1
            continue
        found = search(replace(small_problem(), entries=profile.entries))[0]
        assert 0 < found.value_us < math.inf, what
    assert refused > 200 and open_acceptance("smollm2-135m")


@pytest.mark.slow(reason="hundreds of damaged files")
def test_plans(tmp_path: Path) -> None:
    """The artifact's loader, ``plan --score`` and ``compile --plan``."""
    problem = small_problem()
    body = json.loads(json.dumps(make_plan(problem, search(problem)[0]).to_json()))
    path = tmp_path / "plan.json"
    refused = 0
    for what, each in changed(body):
        path.write_text(json.dumps(each))
        for read in (
            lambda: read_plan(path, 1, DraftPlan("off")),
            lambda: plan_from_json(json.loads(path.read_text()), "plan.json"),
        ):
            try:
                plan = read()
            except FlexspecError as error:
                assert "plan.json" in str(error), what
                refused += 1
                continue
            ranks = [rank for stage in plan.stages for rank in stage.ranks]
            assert len(set(ranks)) == len(ranks) and plan.stages[0].first_block == 0, what
            assert all(a.end_block == b.first_block for a, b in zip(plan.stages, plan.stages[1:], strict=False)), what
            assert plan.ladder.for_batch(1) and plan.micro_batches_for(10**9) >= 1, what
        for use in (
            lambda: score_plan(problem, read_hand_plan(path, 4)),
            lambda: check_runnable(read_plan(path, 1, DraftPlan("off")), 6, 1),
        ):
            try:
                use()
            except FlexspecError as error:
                assert "Fix: " in str(error), what
    assert refused > 800


TOML = """
ssm = "own"
ssm_devices = [7]
draft = "tree:2,2"
batch = 4
micro_batches = 2
[[stages]]
blocks = 3
devices = [0, 1, 2, 3]
[[stages]]
blocks = 3
devices = [4, 5]
"""


def test_plans_by_hand(tmp_path: Path) -> None:
    problem, path = small_problem(), tmp_path / "plan.toml"
    path.write_text(TOML)
    assert score_plan(problem, read_hand_plan(path, 4)).micro_batches == 2
    priced = 0
    for what, each in changed(tomllib.loads(TOML)):
        try:
            path.write_text(as_toml(each))
            priced += score_plan(problem, read_hand_plan(path, 4)).value_us > 0
            read_plan(path, 1, DraftPlan("off"))
        except FlexspecError as error:
            assert "plan.toml" in str(error) and "Fix: " in str(error), what
    assert 0 < priced < 40


def as_toml(body: dict[str, Any]) -> str:
    """Enough of TOML for these tables: JSON values are TOML's, but for null and inline tables."""
    return "\n".join(f"{key} = {value_toml(value)}" for key, value in body.items())


def value_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {value_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(value_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return '"none"' if value is None else json.dumps(value)


@pytest.mark.parametrize("text", ["[" * 50_000, "{" * 50_000, '{"a": ' * 50_000, "\ufeff{}", "nul", ""])
def test_files_that_are_nothing(tmp_path: Path, text: str) -> None:
    for name in ("plan.json", "plan.toml"):
        (tmp_path / name).write_text(text)
        with pytest.raises(FlexspecError, match=name):
            read_plan(tmp_path / name, 1, DraftPlan("off"))

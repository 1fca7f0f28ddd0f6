"""``flexspec.plan``: the parallel plan of a model, its SSMs and a machine. ``flexspec plan`` is this with words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flexspec.api.arguments import AnyPath, AnyPaths, listed, read_dtype, read_weights
from flexspec.compiler.artifact.plan import Plan
from flexspec.compiler.pages.draw_plan import plan_svg
from flexspec.compiler.pages.plan_page import plan_json, plan_page
from flexspec.compiler.pages.plan_view import PlanView
from flexspec.compiler.planner.explain import Explanation, explain
from flexspec.compiler.planner.plan_choice import make_plan, place_devices
from flexspec.compiler.planner.prove import Certificate, prove
from flexspec.compiler.planner.search import Candidate, search
from flexspec.compiler.prices.acceptance_profile import AcceptanceProfile, find_acceptance, open_acceptance
from flexspec.compiler.prices.machine import open_machine
from flexspec.compiler.prices.plan_models import check_same_vocabulary, open_profile
from flexspec.compiler.prices.problem import Problem
from flexspec.errors import PlanError, ProfileError
from flexspec.types import DType


@dataclass(frozen=True)
class FoundPlan:
    """The best plan of a search, with its problem and its explanation. ``flexspec.compile`` takes it."""

    plan: Plan
    problem: Problem
    best: Candidate
    why: Explanation
    acceptance: AcceptanceProfile | None
    certificate: Certificate | None  # of the proof, if one was requested

    @cached_property
    def _view(self) -> PlanView:
        layout = place_devices(self.problem, self.best.place, self.best.cuts)
        return PlanView(self.problem, self.best, layout)

    def page(self) -> str:
        """What ``flexspec plan`` prints: the plan, five runners-up, and what each other choice would cost."""
        return plan_page(self._view, self.why, self.acceptance, self.certificate)

    def to_json(self) -> dict[str, Any]:
        """What ``flexspec plan --json`` prints; ``plan`` in it is what a plan file holds."""
        body = {**plan_json(self._view, self.why, self.acceptance), "plan": self.plan.to_json()}
        return {**body, "certificate": self.certificate.to_json() if self.certificate else None}

    def svg(self) -> str:
        """A picture of the stages, their devices and a round, a whole SVG document."""
        return plan_svg(self._view)


def plan(
    model: AnyPath,
    *,
    machine: AnyPath,
    ssm: AnyPaths = (),
    acceptance: AnyPath | None = None,
    requests: int = 1,
    context: int = 1024,
    objective: str = "latency",
    limit_ms: float | None = None,
    dtype: str | DType = DType.BF16,
    weights: str | None = None,
    degrees: Sequence[int] = (),
    prove: bool = False,
) -> FoundPlan:
    """Search the plan of least time for ``model`` (a config.json is enough) on ``machine``, and explain it.

    ``machine`` and ``acceptance`` are files or names of ones that ship; a shipped acceptance profile is found by the
    SSM's name. ``requests``: most at the same time, each of ``context`` tokens. ``objective``: latency, throughput, or
    goodput with ``limit_ms`` a token. ``dtype`` and ``weights`` as ``flexspec.compile`` has them. ``degrees``: TP
    degrees to try (powers of two if empty). ``prove`` checks the answer with separate code.

    Raises PlanError when nothing fits or options contradict each other, MachineError, ProfileError, and the loaders'.
    """
    problem, profile = open_problem(
        model, machine=machine, ssm=ssm, acceptance=acceptance, requests=requests, context=context,
        objective=objective, limit_ms=limit_ms, dtype=dtype, weights=weights, degrees=degrees,
    )  # fmt: skip
    found = search(problem)
    certificate = check_proof(problem, found[0]) if prove else None
    why = explain(problem, found, profile.llm if profile else "")
    return FoundPlan(make_plan(problem, found[0], certificate), problem, found[0], why, profile, certificate)


def check_proof(problem: Problem, best: Candidate) -> Certificate:
    """The certificate of the search's answer. Raises PlanError when the prover knows a better one."""
    certificate = prove(problem, best.value_us)
    if certificate.refutes(best.value_us, best.free_bytes):
        found = f"the prover found a better plan, {certificate.to_json()}"
        raise PlanError(found, "the plan that the search found", "please report this")
    return certificate


def open_problem(
    model: AnyPath,
    *,
    machine: AnyPath,
    ssm: AnyPaths = (),
    acceptance: AnyPath | None = None,
    requests: int = 1,
    context: int = 1024,
    objective: str = "latency",
    limit_ms: float | None = None,
    dtype: str | DType = DType.BF16,
    weights: str | None = None,
    degrees: Sequence[int] = (),
    times_only: bool = False,
) -> tuple[Problem, AcceptanceProfile | None]:
    """What a plan is searched for, with arguments as :func:`plan` has them.

    ``times_only``: an SSM without a profile is fine, since what a round takes does not depend on the tokens it brings.
    """
    limit_us = _limit_us(objective, limit_ms)
    opened, kind, stored = open_machine(os.fspath(machine)), read_dtype(dtype), read_weights(weights)
    widths = tuple(sorted(set(degrees))) or powers_of_two(max(node.devices for node in opened.kinds))
    llm = open_profile(Path(model), kind, widths, weights=stored)
    ssms = tuple(open_profile(path, kind, ssm=True, weights=stored) for path in listed(ssm))
    check_same_vocabulary(llm.config, ssms)
    profile = None
    if acceptance:
        profile = open_acceptance(os.fspath(acceptance))
    elif ssms:
        try:
            profile = find_acceptance([each.name for each in ssms])
        except ProfileError:
            if not times_only:
                raise
    entries = profile.entries if profile else ()
    return Problem(opened, llm, ssms, entries, requests, context, objective, limit_us, widths), profile


def powers_of_two(largest: int) -> tuple[int, ...]:
    """TP degrees that are tried by default, up to ``largest`` devices of a node."""
    return tuple(1 << i for i in range(largest.bit_length()) if 1 << i <= min(largest, 64))


def _limit_us(objective: str, limit_ms: float | None) -> float:
    if limit_ms is not None and objective != "goodput":
        found = f"--limit-ms with --objective {objective}"
        raise PlanError(found, "--objective goodput, which has a limit", "pass it, or leave out --limit-ms")
    if objective != "goodput":
        return float("inf")
    if not (limit_ms and limit_ms > 0):
        raise PlanError("goodput without a limit", "--limit-ms above 0", "pass --limit-ms 50, for example")
    return limit_ms * 1e3

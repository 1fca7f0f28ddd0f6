"""``flexspec.plan``: a parallel plan for a model, its SSMs and a machine; on the command line, ``flexspec plan``."""

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
from flexspec.host.causes import typed_errors
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
        """A picture of the stages, their devices and a round, as an SVG document."""
        return plan_svg(self._view)


@dataclass(frozen=True)
class PlanQuestion:
    """What a plan is searched for: the arguments of :func:`plan`, which has their meaning and defaults."""

    model: AnyPath
    machine: AnyPath
    ssm: AnyPaths
    acceptance: AnyPath | None
    requests: int
    context: int
    objective: str
    limit_ms: float | None
    dtype: str | DType
    weights: str | None
    degrees: Sequence[int]

    def open(self, *, times_only: bool = False) -> tuple[Problem, AcceptanceProfile | None]:
        """The files that it names, read. Raises as :func:`plan`.

        ``times_only``: an SSM needs no profile, since the time of a round does not depend on the tokens that it
        commits.
        """
        limit_us = _limit_us(self.objective, self.limit_ms)
        machine, dtype = open_machine(os.fspath(self.machine)), read_dtype(self.dtype)
        weights = read_weights(self.weights)
        degrees = tuple(sorted(set(self.degrees))) or powers_of_two(max(node.devices for node in machine.kinds))
        llm = open_profile(Path(self.model), dtype, degrees, weights=weights)
        ssms = tuple(open_profile(path, dtype, ssm=True, weights=weights) for path in listed(self.ssm))
        check_same_vocabulary(llm.config, ssms)
        profile = None
        if self.acceptance:
            profile = open_acceptance(os.fspath(self.acceptance))
        elif ssms:
            try:
                profile = find_acceptance([each.name for each in ssms])
            except ProfileError:
                if not times_only:
                    raise
        entries = profile.entries if profile else ()
        problem = Problem(machine, llm, ssms, entries, self.requests, self.context, self.objective, limit_us, degrees)
        return problem, profile


@typed_errors()
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
    """Search for the fastest plan for ``model`` (a config.json is enough) on ``machine``, and explain it.

    ``machine`` and ``acceptance`` are files or names of shipped ones; a shipped acceptance profile is found by the
    SSM's name. ``requests``: the maximum at the same time, each of ``context`` tokens. ``objective``: latency,
    throughput, or goodput with ``limit_ms`` per token. ``dtype`` and ``weights`` as in ``flexspec.compile``.
    ``degrees``: TP degrees to try (powers of two if empty). ``prove`` checks the answer with separate code.

    Raises PlanError if nothing fits or options contradict each other, MachineError, ProfileError, and the loaders'
    errors.
    """
    question = PlanQuestion(
        model, machine, ssm, acceptance, requests, context, objective, limit_ms, dtype, weights, degrees
    )
    problem, profile = question.open()
    candidates = search(problem)
    best = candidates[0]
    certificate = check_proof(problem, best) if prove else None
    why = explain(problem, candidates, profile.llm if profile else "")
    return FoundPlan(make_plan(problem, best, certificate), problem, best, why, profile, certificate)


def check_proof(problem: Problem, best: Candidate) -> Certificate:
    """The certificate of the search's answer. Raises PlanError if the prover finds a better plan."""
    certificate = prove(problem, best.value_us)
    if certificate.refutes(best.value_us, best.free_bytes):
        found = f"the prover found a better plan, {certificate.to_json()}"
        raise PlanError(found, "the plan that the search found", "please report this")
    return certificate


def powers_of_two(largest: int) -> tuple[int, ...]:
    """The TP degrees to try by default, up to the ``largest`` number of devices of a node."""
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

"""The page that ``flexspec plan`` prints, and its JSON: a plan that people can read and explain back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from flexspec.compiler.pages.plan_view import PlanView
from flexspec.compiler.planner.explain import Explanation, describe, place_words
from flexspec.compiler.planner.prove import Certificate
from flexspec.compiler.planner.search import Candidate
from flexspec.compiler.prices.acceptance_profile import AcceptanceProfile
from flexspec.compiler.prices.memory import RankBytes, cache_tokens
from flexspec.compiler.prices.problem import Problem
from flexspec.compiler.prices.rounds import RoundCost

BAR = 40
_MARKS = (("weights", "#"), ("kv", "k"), ("ssm", "s"), ("activations", "a"), ("tree_scratch", "t"), ("buffers", "b"))
PLAN_TITLE = "PLAN (TP n: every matrix is split over n devices; the machine's devices are numbered node by node)"
_LEGEND = "# weights, k KV, s SSM, a activations, t tree, b buffers, r reserve"


def plan_page(
    view: PlanView, why: Explanation, acceptance: AcceptanceProfile | None, certificate: Certificate | None
) -> str:
    """The whole page of the best plan."""
    problem, best = view.problem, view.plan
    parts = [
        _head(problem),
        _section(PLAN_TITLE, [*_stage_lines(view), *_limit_lines(problem, why)]),
        _section(_round_title(best), _timeline(view)),
        _section(f"MEMORY of a device ({_LEGEND})", _memory(view)),
        _section("LADDER: what runs at each batch size", _ladder(problem, why)),
        _section("RUNNERS-UP", _runners(problem, why)),
        _section("WHY NOT", [f"TP {degree}: {reason}" for degree, reason in why.why_not] or ["every degree is used"]),
        _section("NOTES", list(why.notes)),
        _section("PROOF", _proof(certificate, best)),
        _section("WHERE THE NUMBERS COME FROM", _origins(problem, acceptance)),
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def score_page(view: PlanView, best: Candidate | None) -> str:
    """The page of a hand-written plan on the devices that it names, compared with the best."""
    parts = [
        _head(view.problem),
        _section(f"YOUR {PLAN_TITLE}", _stage_lines(view)),
        _section(_round_title(view.plan), _timeline(view)),
        _section(f"MEMORY of a device ({_LEGEND})", _memory(view)),
    ]
    if best:
        ratio = view.plan.value_us / best.value_us
        parts.append(_section("BESIDE THE BEST", [f"{ratio:.2f} times the time of {describe(view.problem, best)}"]))
    return "\n".join(parts)


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines), ""]) if lines else ""


def _head(problem: Problem) -> str:
    ssms = f" with {' + '.join(ssm.name for ssm in problem.ssms)}" if problem.ssms else ""
    goal = {
        "latency": "least time per token",
        "throughput": "most tokens per second",
        "goodput": f"most tokens per second at no more than {problem.limit_us / 1e3:g} ms a token",
    }[problem.objective]
    most = "" if problem.objective == "latency" else "up to "  # the others may serve fewer at once
    machine, load = problem.machine, f"{most}{problem.requests} requests at once, each"
    return (
        f"{problem.llm.name}{ssms} on {machine.name} ({machine.devices} device{'s' if machine.devices > 1 else ''}, "
        f"{machine.nodes} node{'s' if machine.nodes > 1 else ''})\n"
        f"{load if problem.requests > 1 else 'one request'} of {problem.context_tokens} tokens; "
        f"{problem.llm.precision}; {goal}\n"
    )


def _stage_lines(view: PlanView) -> list[str]:
    problem, plan, layout, cost = view.problem, view.plan, view.layout, view.cost
    lines, first = [], 0
    for i, (cut, devices) in enumerate(zip(plan.cuts, layout.stages, strict=True)):
        if i:
            way = "to the next node" if cut.new_node else "inside the node"
            lines.append(f"   | hop {way:34s} {cost.hops_us[i - 1] / 1e3:8.2f} ms")
        where = f"{problem.kind(cut.kind).device.name} {spans(devices)}"
        blocks = f"blocks {first}-{first + cut.blocks - 1}"
        drafts = plan.place.runs_in(first=i == 0, last=i == len(plan.cuts) - 1)
        time = f"{cost.stages[i].stage_us / 1e3:8.2f} ms{', drafting included' if drafts else ''}"
        lines.append(f"stage {i}: {blocks:14s} TP {cut.degree}  {where:22s} {time}")
        lines.append(view.splits[i].line())
        first += cut.blocks
    separate = f" {spans([device for ssm in layout.ssms for device in ssm])}" if plan.place.separate else ""
    lines.append(f"{place_words(plan)}{separate}; draft plan {plan.entry.draft}")
    return lines + _rate_lines(plan, cost)


def _rate_lines(plan: Candidate, cost: RoundCost) -> list[str]:
    """How long a round takes, and how many tokens it commits."""
    latency, busiest = f"{cost.latency_us / 1e3:.2f} ms", f"{cost.bottleneck_us / 1e3:.2f} ms"
    every = f"a round every {plan.period_us / 1e3:.2f} ms"
    if plan.micro_batches == 1:
        lines = [f"all {plan.batch} requests go through together: {every}"] if plan.batch > 1 else [every]
    else:
        count = plan.micro_batches
        lines = [
            f"{plan.batch} requests go through in {count} micro-batches of {plan.micro}: {every},",
            f"  the longer of a micro-batch's whole round, {latency}, and {count} x the busiest part, {busiest}",
        ]
    whose = "" if plan.batch == 1 else " of each request"
    tokens = f"a round commits {plan.entry.committed_tokens:g} tokens{whose}: {plan.per_token_us / 1e3:.2f} ms a token"
    return [*lines, f"{tokens}, {plan.tokens_per_s:.1f} tokens/s{' in all' if plan.batch > 1 else ''}"]


def _limit_lines(problem: Problem, why: Explanation) -> list[str]:
    """How many requests may run at once within the limit."""
    most = most_within(problem, why)
    late = next((rung for rung in why.rungs if rung.batch > most), None)
    if late is None:
        return []
    time, limit = f"{late.per_token_us / 1e3:.2f} ms a token", f"the limit of {problem.limit_us / 1e3:g}"
    return [f"{late.batch} at once would take {time} and miss {limit}: serve with --max-requests {most}"]


def most_within(problem: Problem, why: Explanation) -> int:
    """The largest batch of the ladder such that neither it nor a smaller one misses the limit."""
    meeting = itertools.takewhile(lambda rung: rung.per_token_us <= problem.limit_us, why.rungs)
    return max([why.best.batch, *(rung.batch for rung in meeting)])


def spans(devices: Sequence[int]) -> str:
    """``0-3`` for 0, 1, 2, 3."""
    parts: list[list[int]] = []
    for device in devices:
        if parts and device == parts[-1][-1] + 1:
            parts[-1].append(device)
        else:
            parts.append([device])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _round_title(plan: Candidate) -> str:
    return f"ROUND of {'one micro-batch' if plan.micro_batches > 1 else 'all requests'}, from draft to commit"


def _timeline(view: PlanView) -> list[str]:
    rows = view.timeline
    total, start, lines = sum(us for _, us in rows), 0.0, []
    for name, us in rows:
        first, end = int(start / total * BAR), max(int(start / total * BAR) + 1, round((start + us) / total * BAR))
        bar = " " * first + "=" * (end - first)
        lines.append(f"{name:22s} {us / 1e3:8.2f} ms |{bar[:BAR]:{BAR}s}|")
        start += us
    return lines


def _memory_rows(view: PlanView) -> list[tuple[str, RankBytes]]:
    """(what it holds and which devices they are, bytes of one of them) for all devices in use."""
    rows = [(f"stage {i}, {spans(view.layout.stages[i])}", memory) for i, memory in enumerate(view.stage_bytes)]
    for device, memory in sorted(view.drafting_bytes.items()):
        if device not in view.stage_of_device:
            rows.append((f"SSM, {device}", memory))
    return rows


def _memory(view: PlanView) -> list[str]:
    problem, rows = view.problem, _memory_rows(view)
    width, lines = max(len(name) for name, _ in rows), []
    for name, memory in rows:
        bar = "".join(mark * round(getattr(memory, part) / memory.limit * BAR) for part, mark in _MARKS)
        bar += "r" * round(memory.reserve / memory.limit * BAR)
        parts = [("weights", memory.weights), ("KV", memory.kv), ("SSM", memory.ssm)]
        inside = ", ".join(f"{part} {count / 1e9:.2f}" for part, count in parts if count)
        used = f"{memory.total / 1e9:.1f} of {memory.limit / 1e9:.1f} GB"
        lines.append(f"{name:{width}s} |{bar[:BAR]:{BAR}s}| {used} ({inside})")
    drafting_only = sum(name.startswith("SSM") for name, _ in rows)
    idle = problem.machine.devices - len(view.stage_of_device) - drafting_only
    lines += [f"{idle} devices hold nothing" if idle > 1 else "1 device holds nothing"] if idle else []
    tokens = [memory.free * cache_tokens(problem.workload) // memory.kv // problem.requests
              for _, memory in rows if memory.kv]  # fmt: skip
    return [*lines, f"the fullest stage has room for {min(tokens):,} more tokens of each request"]


def _ladder(problem: Problem, why: Explanation) -> list[str]:
    lines = [f"{'batch':>5s}  {'micro-batches':>13s}  {'ms a token':>10s}  {'tokens/s':>9s}  draft plan"]
    for rung in why.rungs:
        missed = "  (misses the limit)" if rung.per_token_us > problem.limit_us else ""
        lines.append(
            f"{rung.batch:5d}  {rung.micro_batches:13d}  {rung.per_token_us / 1e3:10.2f}  {rung.tokens_per_s:9.1f}  "
            f"{rung.entry.draft}{missed}"
        )
    return lines


def _runners(problem: Problem, why: Explanation) -> list[str]:
    lines = [
        f"{plan.value_us / why.best.value_us:6.3f} times the time: {describe(problem, plan)}" for plan in why.runners
    ]
    if why.by_hand:
        ratio, words = why.by_hand.value_us / why.best.value_us, describe(problem, why.by_hand)
        lines.append(f"best of equal stages and one degree, as written by hand: {ratio:.3f} times ({words})")
    return lines


def _proof(certificate: Certificate | None, best: Candidate) -> list[str]:
    if certificate is None:
        return ["found by an exact search; --prove checks it with separate code"]
    size = f"{certificate.plans:,}" if certificate.plans < 10**12 else f"{float(certificate.plans):.1e}"
    ways = f"{size} plans (times {certificate.choices} ways to run them)"
    if certificate.proven:
        how = f"{certificate.method}, {certificate.examined:,} examined"
        lines = [f"none of {ways} is better: {how}"]
        if certificate.free_bytes is not None:
            free = certificate.free_bytes / 1e9
            lines.append(f"and none that is as good leaves more memory free on its fullest device, {free:.2f} GB")
        return lines
    return [
        f"separate code found no better one of {ways} in {certificate.examined:,} steps of {certificate.method},",
        f"and showed that none takes less than {certificate.bound_us / best.value_us:.3f} times this time (gap "
        f"{certificate.gap:.1%});",
        "that this one is the best rests on the search, which is exact",
    ]


def _origins(problem: Problem, acceptance: AcceptanceProfile | None) -> list[str]:
    lines = [f"{name} = {c.value:g} x {c.correction:g}: {c.origin}" for name, c in problem.machine.constants()]
    if acceptance:
        lines.append(f"tokens a round, {acceptance.source()} ({acceptance.date}; {acceptance.prompts})")
    lines.append("operators: the records of the graph that is served, cut for each degree by the partition pass")
    return lines


def plan_json(view: PlanView, why: Explanation | None, acceptance: AcceptanceProfile | None) -> dict[str, Any]:
    """The figures of the page. The caller adds the plan itself."""
    problem, plan = view.problem, view.plan
    body: dict[str, Any] = {
        "model": problem.llm.name,
        "ssms": [ssm.name for ssm in problem.ssms],
        "machine": problem.machine.name,
        "objective": problem.objective,
        "requests": problem.requests,
        "context_tokens": problem.context_tokens,
        "round_us": dict(view.timeline),
        "stages": [split.to_json() for split in view.splits],
        "memory_bytes": [dict(memory.table()) for memory in view.stage_bytes],
        "free_bytes": plan.free_bytes,
        "constants": {
            name: {"value": c.value, "correction": c.correction, "origin": c.origin}
            for name, c in problem.machine.constants()
        },
        "acceptance": acceptance.source() if acceptance else None,
    }
    if why:
        body["runners_up"] = [{"plan": describe(problem, c), "times": c.value_us / plan.value_us} for c in why.runners]
        body["why_not"] = {str(degree): reason for degree, reason in why.why_not}
        body["notes"] = list(why.notes)
        body["ladder"] = [
            {"batch": rung.batch, "micro_batches": rung.micro_batches, "draft": str(rung.entry.draft),
             "ms_per_token": rung.per_token_us / 1e3, "tokens_per_s": rung.tokens_per_s,
             "within_limit": rung.per_token_us <= problem.limit_us} for rung in why.rungs
        ]  # fmt: skip
        body["max_requests"] = most_within(problem, why)
    return body

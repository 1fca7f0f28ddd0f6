"""The page that ``flexspec plan`` prints, and its JSON: a plan that people can read and explain back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from flexspec.compiler.pages.stage_split import stage_splits
from flexspec.compiler.planner.explain import Explanation, describe, place_words
from flexspec.compiler.planner.plan_choice import Layout, drafting_bytes, place_devices, plan_bytes
from flexspec.compiler.planner.prove import Certificate
from flexspec.compiler.planner.search import Candidate
from flexspec.compiler.prices.acceptance_profile import AcceptanceProfile
from flexspec.compiler.prices.memory import RankBytes, cache_tokens
from flexspec.compiler.prices.problem import Problem
from flexspec.compiler.prices.rounds import RoundCost, cost_of

BAR = 40
_MARKS = (("weights", "#"), ("kv", "k"), ("ssm", "s"), ("activations", "a"), ("tree_scratch", "t"), ("buffers", "b"))
PLAN_TITLE = "PLAN (TP n: every matrix is split over n devices; the machine's devices are numbered node by node)"
_LEGEND = "# weights, k KV, s SSM, a activations, t tree, b buffers, r reserve"


def plan_page(
    problem: Problem, why: Explanation, acceptance: AcceptanceProfile | None, certificate: Certificate | None
) -> str:
    """The whole page."""
    best = why.best
    layout = place_devices(problem, best.place, best.cuts)
    parts = [
        _head(problem),
        _section(PLAN_TITLE, [*_stage_lines(problem, best, layout), *_limit_lines(problem, why)]),
        _section(_round_title(best), _timeline(problem, best)),
        _section(f"MEMORY of a device ({_LEGEND})", _memory(problem, best, layout)),
        _section("LADDER: what runs at each batch size", _ladder(problem, why)),
        _section("RUNNERS-UP", _runners(problem, why)),
        _section("WHY NOT", [f"TP {degree}: {reason}" for degree, reason in why.why_not] or ["every degree is used"]),
        _section("NOTES", list(why.notes)),
        _section("PROOF", _proof(certificate, best)),
        _section("WHERE THE NUMBERS COME FROM", _origins(problem, acceptance)),
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def score_page(problem: Problem, plan: Candidate, layout: Layout, best: Candidate | None) -> str:
    """The page of a hand-written plan on the devices that it names, beside the best."""
    parts = [
        _head(problem),
        _section(f"YOUR {PLAN_TITLE}", _stage_lines(problem, plan, layout)),
        _section(_round_title(plan), _timeline(problem, plan)),
        _section(f"MEMORY of a device ({_LEGEND})", _memory(problem, plan, layout)),
    ]
    if best:
        ratio = plan.value_us / best.value_us
        parts.append(_section("BESIDE THE BEST", [f"{ratio:.2f} times the time of {describe(problem, best)}"]))
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


def _stage_lines(problem: Problem, plan: Candidate, layout: Layout) -> list[str]:
    cost, splits = cost_of(problem, plan.place, plan, plan.cuts), stage_splits(problem, plan)
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
        lines.append(splits[i].line())
        first += cut.blocks
    own = f" {spans([device for ssm in layout.ssms for device in ssm])}" if plan.place.separate else ""
    lines.append(f"{place_words(plan)}{own}; draft plan {plan.entry.draft}")
    return lines + _rate_lines(plan, cost)


def _rate_lines(plan: Candidate, cost: RoundCost) -> list[str]:
    """How often a round comes, and what it brings."""
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
    each = "" if plan.batch == 1 else " of each request"
    tokens = f"a round commits {plan.entry.committed_tokens:g} tokens{each}: {plan.per_token_us / 1e3:.2f} ms a token"
    return [*lines, f"{tokens}, {plan.tokens_per_s:.1f} tokens/s{' in all' if plan.batch > 1 else ''}"]


def _limit_lines(problem: Problem, why: Explanation) -> list[str]:
    """How many requests may run at once if the limit is to hold."""
    most = most_within(problem, why)
    late = next((rung for rung in why.rungs if rung.batch > most), None)
    if late is None:
        return []
    found, limit = f"{late.per_token_us / 1e3:.2f} ms a token", f"the limit of {problem.limit_us / 1e3:g}"
    return [f"{late.batch} at once would take {found} and miss {limit}: serve with --max-requests {most}"]


def most_within(problem: Problem, why: Explanation) -> int:
    """The largest batch of the ladder up to which no rung misses the limit."""
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


def timeline(problem: Problem, plan: Candidate) -> list[tuple[str, float]]:
    """What happens one after the other in a round of a micro-batch, with its microseconds."""
    cost = cost_of(problem, plan.place, plan, plan.cuts)
    rows = [("draft", cost.drafting_us)]
    for i, stage in enumerate(cost.stages):
        rows += [(f"hop to stage {i}", cost.hops_us[i - 1])] if i else []
        rows.append((f"verify, stage {i}", stage.verify_us))
    rows.append(("ids out and back", cost.messages_us))
    rows.append(("accept, commit (host)", cost.host_us))
    return [(name, us) for name, us in rows if us > 0.0005]


def _round_title(plan: Candidate) -> str:
    return f"ROUND of {'one micro-batch' if plan.micro_batches > 1 else 'all requests'}, from draft to commit"


def _timeline(problem: Problem, plan: Candidate) -> list[str]:
    rows = timeline(problem, plan)
    total, start, lines = sum(us for _, us in rows), 0.0, []
    for name, us in rows:
        first, end = int(start / total * BAR), max(int(start / total * BAR) + 1, round((start + us) / total * BAR))
        bar = " " * first + "=" * (end - first)
        lines.append(f"{name:22s} {us / 1e3:8.2f} ms |{bar[:BAR]:{BAR}s}|")
        start += us
    return lines


def memory_rows(problem: Problem, plan: Candidate, layout: Layout) -> list[tuple[str, RankBytes]]:
    """(what lives there and on which devices, bytes of one of them) for all devices that hold anything."""
    held = plan_bytes(problem, plan.place, plan.cuts)
    rows = [(f"stage {i}, {spans(layout.stages[i])}", each) for i, each in enumerate(held)]
    staged = {device for stage in layout.stages for device in stage}
    for device, each in sorted(drafting_bytes(problem, plan.place, layout).items()):
        if device not in staged:
            rows.append((f"SSM, {device}", each))
    return rows


def _memory(problem: Problem, plan: Candidate, layout: Layout) -> list[str]:
    rows = memory_rows(problem, plan, layout)
    width, lines = max(len(name) for name, _ in rows), []
    for name, held in rows:
        bar = "".join(mark * round(getattr(held, part) / held.limit * BAR) for part, mark in _MARKS)
        bar += "r" * round(held.reserve / held.limit * BAR)
        parts = [("weights", held.weights), ("KV", held.kv), ("SSM", held.ssm)]
        inside = ", ".join(f"{part} {count / 1e9:.2f}" for part, count in parts if count)
        line = f"{name:{width}s} |{bar[:BAR]:{BAR}s}| {held.total / 1e9:.1f} of {held.limit / 1e9:.1f} GB ({inside})"
        lines.append(line)
    idle = problem.machine.devices - sum(map(len, layout.stages)) - sum(name.startswith("SSM") for name, _ in rows)
    lines += [f"{idle} devices hold nothing" if idle > 1 else "1 device holds nothing"] if idle else []
    more = [
        held.free * cache_tokens(problem.workload) // held.kv // problem.requests for _, held in rows if held.kv
    ]  # fmt: skip
    return [*lines, f"the fullest stage has room for {min(more):,} more tokens of each request"]


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
        f"{each.value_us / why.best.value_us:6.3f} times the time: {describe(problem, each)}" for each in why.runners
    ]
    if why.by_hand:
        ratio, plan = why.by_hand.value_us / why.best.value_us, describe(problem, why.by_hand)
        lines.append(f"best of equal stages and one degree, as written by hand: {ratio:.3f} times ({plan})")
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


def plan_json(
    problem: Problem, plan: Candidate, why: Explanation | None, acceptance: AcceptanceProfile | None
) -> dict[str, Any]:
    """The figures of the page. The plan itself is added by the caller."""
    body: dict[str, Any] = {
        "model": problem.llm.name,
        "ssms": [ssm.name for ssm in problem.ssms],
        "machine": problem.machine.name,
        "objective": problem.objective,
        "requests": problem.requests,
        "context_tokens": problem.context_tokens,
        "round_us": dict(timeline(problem, plan)),
        "stages": [split.to_json() for split in stage_splits(problem, plan)],
        "memory_bytes": [dict(held.table()) for held in plan_bytes(problem, plan.place, plan.cuts)],
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

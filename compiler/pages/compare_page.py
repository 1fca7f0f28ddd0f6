"""Predicted and measured times as a page of tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexspec.compiler.pages.predicted_lines import ALL, Outcome, spearman, worst_ratio

_MIN_SHOWN_US = 0.5


def compare_page(outcomes: Sequence[Outcome], about: str) -> str:
    """All plans in one table, then every plan's parts and operator classes."""
    lines = [
        about,
        "",
        f"{'':3s}{'plan':44s} {'batch':>5s} {'rows':>4s}  {'predicted ms':>12s}  {'measured ms':>11s}  ratio",
    ]
    for number, outcome in enumerate(outcomes, 1):
        trial = outcome.trial
        lines.append(
            f"{number:2d} {trial.name:44s} {trial.batch:5d} {trial.rows:4d}  {outcome.predicted_us / 1e3:12.2f}  "
            f"{outcome.measured_us / 1e3:11.2f}  {outcome.ratio:5.2f}"
        )
    lines += ["", verdict(outcomes)]
    for number, outcome in enumerate(outcomes, 1):
        lines += ["", f"{number} {outcome.trial.name}, batch {outcome.trial.batch}: microseconds of a round"]
        lines += _table(outcome)
    return "\n".join(lines) + "\n"


def verdict(outcomes: Sequence[Outcome]) -> str:
    """How well the model ranks the plans, and its largest error."""
    rank = spearman([outcome.predicted_us for outcome in outcomes], [outcome.measured_us for outcome in outcomes])
    return f"{len(outcomes)} plans: rank correlation (Spearman) {rank:.3f}, worst ratio {worst_ratio(outcomes):.2f}"


def compare_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of the page, with every line."""
    return {
        "spearman": spearman(
            [outcome.predicted_us for outcome in outcomes], [outcome.measured_us for outcome in outcomes]
        ),
        "worst_ratio": worst_ratio(outcomes),
        "plans": [_plan_json(outcome) for outcome in outcomes],
    }


def _plan_json(outcome: Outcome) -> dict[str, Any]:
    trial = outcome.trial
    return {
        "name": trial.name, "stages": [[s.first_block, s.end_block, list(s.ranks)] for s in trial.stages],
        "ssm": trial.place.name, "draft": str(trial.entry.draft), "batch": trial.batch, "rows": trial.rows,
        "rounds": outcome.rounds, "predicted_us": outcome.predicted_us, "measured_us": outcome.measured_us,
        "ratio": outcome.ratio,
        "lines": [
            {"part": part, "what": what, "predicted_us": predicted, "measured_us": measured,
             "ratio": predicted / measured if measured else None}
            for part, what, predicted, measured in outcome.rows()
        ],
    }  # fmt: skip


def _table(outcome: Outcome) -> list[str]:
    lines = [f"   {'part':11s} {'what':16s} {'predicted':>10s}  {'measured':>10s}  ratio"]
    for part, what, predicted, measured in [*outcome.rows(), ("round", ALL, outcome.predicted_us, outcome.measured_us)]:
        if what == ALL or max(predicted, measured) >= _MIN_SHOWN_US:
            ratio = f"{predicted / measured:5.2f}" if measured > 0 and predicted > 0 else "    -"
            shown = part if what == ALL else ""
            lines.append(
                f"   {shown:11s} {'' if what == ALL else what:16s} {predicted:10.1f}  {measured:10.1f}  {ratio}"
            )
    return lines

"""The draft plans of a plan's ladder, read at compile and at start: a wrong one must not wait for its batch."""

from __future__ import annotations

from flexspec.checked_table import Fail
from flexspec.compiler.artifact.plan import OPEN_BATCH, Plan
from flexspec.draft_plan import DraftPlan
from flexspec.errors import RequestError


def parse_ladder(plan: Plan, source: str, fail: Fail) -> tuple[DraftPlan, ...]:
    """The draft plan of every rung, the smallest batch first. Raises ``fail``'s error for one that does not parse."""
    found = []
    for batch, text in plan.ladder:
        try:
            found.append(DraftPlan.parse(text))
        except RequestError as error:
            where = "any batch" if batch == OPEN_BATCH else f"batches to {batch}"
            raise fail(f"{source}: draft plan {text!r} for {where}: {error.found}", error.expected) from None
    return tuple(found)

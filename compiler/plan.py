"""The parallel plan of an artifact: stages with their TP degree and ranks, where each SSM lives, the tree ladder.

One rank is a plan with one stage of degree 1, not a path of its own. Owns the record and its JSON form; it neither
searches nor runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flexspec.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks ``first_block`` to ``end_block`` (not included), split over ``ranks`` (TP degree = their number)."""

    first_block: int
    end_block: int
    ranks: tuple[int, ...]

    @property
    def degree(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Plan:
    """``ssm_ranks[i]`` run SSM i. ``ladder``: (largest batch, draft plan) in ascending order; the last one is open."""

    stages: tuple[Stage, ...]
    ssm_ranks: tuple[tuple[int, ...], ...]
    ladder: tuple[tuple[int, str], ...]
    origin: str  # "default", "search", "hand"

    def draft_for(self, batch: int) -> str:
        """The draft plan of a batch of this many requests."""
        for largest, draft in self.ladder:
            if batch <= largest:
                return draft
        return self.ladder[-1][1]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def single_rank(blocks: int, ssms: int, draft: str) -> Plan:
    """Everything on rank 0."""
    return Plan((Stage(0, blocks, (0,)),), ((0,),) * ssms, ((1 << 30, draft),), "default")


def plan_from_json(body: Mapping[str, Any]) -> Plan:
    """Raises ArtifactError when a field is missing or of the wrong kind."""
    try:
        plan = Plan(
            tuple(Stage(int(s["first_block"]), int(s["end_block"]), tuple(s["ranks"])) for s in body["stages"]),
            tuple(tuple(ranks) for ranks in body["ssm_ranks"]),
            tuple((int(batch), str(draft)) for batch, draft in body["ladder"]),
            str(body["origin"]),
        )
        if not plan.stages or not plan.ladder:
            raise ValueError("no stages, or no ladder")
        return plan
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"plan.json does not hold a plan ({error})",
            "stages, ssm_ranks, ladder and origin",
            "compile the model again",
        ) from None

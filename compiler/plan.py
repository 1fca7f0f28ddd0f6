"""The parallel plan of an artifact: stages with their TP degree and ranks, where each SSM lives, the tree ladder.

One rank is a plan with one stage of degree 1, not a path of its own. Owns the record and its JSON form; it neither
searches nor runs. What a search adds (devices, prediction, certificate) is optional, and absent from the file if empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flexspec.errors import ArtifactError

MOST_MICRO_BATCHES = 16


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
    """``ssm_ranks[i]`` run SSM i. ``ladder``: (largest batch, draft plan) in ascending order; the last one is open.

    ``devices[r]``: the machine's device of rank r (empty: rank r is device r). ``micro_batches``: how many are in
    flight, a rung of the ladder (empty: one). ``predicted`` are figures of the cost model.
    """

    stages: tuple[Stage, ...]
    ssm_ranks: tuple[tuple[int, ...], ...]
    ladder: tuple[tuple[int, str], ...]
    origin: str  # "default", "search", "hand"
    devices: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    ssm_place: str = ""
    machine: str = ""
    predicted: tuple[tuple[str, float], ...] = ()
    certificate: tuple[tuple[str, Any], ...] = ()

    def draft_for(self, batch: int) -> str:
        """The draft plan of a batch of this many requests."""
        return self.ladder[self._rung(batch)][1]

    def micro_batches_for(self, batch: int) -> int:
        """Micro-batches in flight for this many requests; a plan with one number has it for all."""
        if not self.micro_batches:
            return 1
        return self.micro_batches[min(self._rung(batch), len(self.micro_batches) - 1)]

    def _rung(self, batch: int) -> int:
        rungs = (i for i, (largest, _) in enumerate(self.ladder) if batch <= largest)
        return next(rungs, len(self.ladder) - 1)

    def to_json(self) -> dict[str, Any]:
        body = asdict(self)
        for name in ("predicted", "certificate"):
            body[name] = dict(body[name])
        return {name: value for name, value in body.items() if name in _REQUIRED or value}


_REQUIRED = ("stages", "ssm_ranks", "ladder", "origin")
_OPTIONAL = ("devices", "micro_batches", "ssm_place", "machine", "predicted", "certificate")


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
            tuple(int(device) for device in body.get("devices", ())),
            tuple(int(count) for count in body.get("micro_batches", ())),
            str(body.get("ssm_place", "")),
            str(body.get("machine", "")),
            tuple((str(name), float(value)) for name, value in sorted(body.get("predicted", {}).items())),
            tuple(sorted(body.get("certificate", {}).items())),
        )
        unknown = sorted(set(body) - {*_REQUIRED, *_OPTIONAL})
        if unknown:
            raise ValueError(f"unknown fields {', '.join(unknown)}")
        if not plan.stages or not plan.ladder:
            raise ValueError("no stages, or no ladder")
        return plan
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"plan.json does not hold a plan ({error})",
            "stages, ssm_ranks, ladder and origin",
            "compile the model again",
        ) from None

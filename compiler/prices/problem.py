"""What a plan is searched for: models, machine, load, objective; and the places where SSMs can live."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from flexspec.compiler.prices.acceptance_profile import OFF, DraftEntry
from flexspec.compiler.prices.machine import Machine, NodeKind
from flexspec.compiler.prices.memory import RankBytes, Workload, rank_bytes, ssm_bytes
from flexspec.compiler.prices.profile import ModelProfile
from flexspec.errors import PlanError

OBJECTIVES = ("latency", "throughput", "goodput")
PLACE_WORDS = {
    "none": "no SSM",
    "own": "on devices of their own",
    "first": "with stage 0",
    "last": "on the last stage",
    "all": "data parallel over all devices",
}
MAX_REQUESTS = 4096
TIE = 1 + 1e-10  # values within this factor are equal: sums of the same times in another order differ by less


@dataclass(frozen=True, slots=True)
class SsmPlace:
    """Where SSMs live. ``kind``: for "own", the kind of node (number in the machine) that gives a device to each."""

    name: str
    kind: int = -1


@dataclass(frozen=True, slots=True)
class Pool:
    """``count`` nodes of machine kind ``kind`` with ``devices`` devices each that stages may use."""

    kind: int
    devices: int
    count: int


@dataclass(frozen=True)
class Problem:
    """``limit_us``: most microseconds per token of a request (goodput). ``degrees``: TP degrees to be tried."""

    machine: Machine
    llm: ModelProfile
    ssms: tuple[ModelProfile, ...]
    entries: tuple[DraftEntry, ...]  # of the acceptance profile; off is always there
    requests: int
    context_tokens: int
    objective: str = "latency"
    limit_us: float = float("inf")
    degrees: tuple[int, ...] = (1, 2, 4, 8)

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= MAX_REQUESTS:
            raise PlanError(f"{self.requests} requests", f"1 to {MAX_REQUESTS}", "choose a number in that range")
        if not 1 <= self.context_tokens <= self.llm.config.max_positions:
            found, most = f"a context of {self.context_tokens} tokens", self.llm.config.max_positions
            raise PlanError(found, f"1 to {most}, the model's positions", "choose a length in that range")
        if self.objective not in OBJECTIVES:
            raise PlanError(f"objective {self.objective!r}", f"one of {', '.join(OBJECTIVES)}", "correct the name")

    @cached_property
    def legal_degrees(self) -> tuple[int, ...]:
        """Degrees that the model can be cut to."""
        return tuple(sorted(degree for degree in set(self.degrees) if degree in self.llm.ranks))

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes of the ladder: powers of two, and the most requests."""
        return tuple(dict.fromkeys([1 << i for i in range(self.requests.bit_length())] + [self.requests]))

    @cached_property
    def drafting(self) -> tuple[DraftEntry, ...]:
        return self.entries if self.ssms else ()

    @cached_property
    def workload(self) -> Workload:
        """What memory must hold, whatever rung of the ladder is in use."""
        largest = max((entry.most_rows for entry in self.drafting), default=1)
        return Workload(self.requests, self.context_tokens, largest)

    @cached_property
    def ssm_total_bytes(self) -> int:
        return sum(ssm_bytes(ssm, self.workload) for ssm in self.ssms)

    @cached_property
    def ssm_share_bytes(self) -> int:
        """All SSMs on one device when every device drafts for an equal share of the requests."""
        return sum(self.ssm_share_of(ssm) for ssm in self.ssms)

    def ssm_share_of(self, ssm: ModelProfile) -> int:
        """One SSM on one device, likewise."""
        return ssm_bytes(ssm, replace(self.workload, requests=-(-self.requests // self.machine.devices)))

    def kind(self, number: int) -> NodeKind:
        return self.machine.kinds[number]

    def places(self) -> list[SsmPlace]:
        """Every place to try. "own" needs a node with a device for each SSM, and room for it there."""
        found = [SsmPlace("none")]
        if not self.drafting:
            return found
        for number, kind in enumerate(self.machine.kinds):
            fits = all(ssm_bytes(ssm, self.workload) <= device_bytes(kind) for ssm in self.ssms)
            if kind.devices >= len(self.ssms) and self.machine.devices > len(self.ssms) and fits:
                found.append(SsmPlace("own", number))
        found += [SsmPlace("first"), SsmPlace("last")]
        if self.machine.devices > 1 and all(self.ssm_share_bytes <= device_bytes(kind) for kind in self.machine.kinds):
            found.append(SsmPlace("all"))
        return found

    def entries_at(self, place: SsmPlace) -> tuple[DraftEntry, ...]:
        return (OFF,) if place.name == "none" else self.drafting

    def pools(self, place: SsmPlace) -> tuple[Pool, ...]:
        """Nodes left for stages: for "own", the last node of the kind lacks the SSMs' devices."""
        pools = []
        for number, kind in enumerate(self.machine.kinds):
            if place.name != "own" or number != place.kind:
                pools.append(Pool(number, kind.devices, kind.count))
                continue
            if kind.count > 1:
                pools.append(Pool(number, kind.devices, kind.count - 1))
            if kind.devices > len(self.ssms):
                pools.append(Pool(number, kind.devices - len(self.ssms), 1))
        return tuple(pools)

    def stage_bytes(
        self, kind: int, degree: int, blocks: int, place: SsmPlace, *, first: bool, last: bool
    ) -> RankBytes:
        """The largest rank of a stage, with the SSMs that live there."""
        extra = self.extra_bytes(place, first=first, last=last)
        device = self.kind(kind).device
        return rank_bytes(self.llm, degree, blocks, self.workload, device, first=first, last=last, ssm=extra)

    def free_bytes(self, kind: int, degree: int, place: SsmPlace, *, first: bool, last: bool) -> tuple[int, int]:
        """(bytes that a stage without blocks leaves free, bytes that each block takes of them)."""
        none, one = (self.stage_bytes(kind, degree, n, place, first=first, last=last) for n in (0, 1))
        return none.free, none.free - one.free  # the memory function is linear in blocks

    def most_blocks(self, kind: int, degree: int, place: SsmPlace, *, first: bool, last: bool) -> int:
        """Blocks that a stage can hold; -1 if it cannot even hold what stands around its blocks."""
        room, per_block = self.free_bytes(kind, degree, place, first=first, last=last)
        return min(self.llm.blocks, room // per_block) if room >= 0 else -1

    def drafting_free_bytes(self, place: SsmPlace) -> float:
        """Bytes free on the fullest device that does nothing but draft; inf where there is none by its own."""
        if place.name != "own":
            return math.inf
        return device_bytes(self.kind(place.kind)) - max(ssm_bytes(ssm, self.workload) for ssm in self.ssms)

    def extra_bytes(self, place: SsmPlace, *, first: bool, last: bool) -> int:
        """Bytes of SSMs on a rank of a stage; data parallel, each holds the caches of its share of the requests."""
        if place.name == "all":
            return self.ssm_share_bytes
        here = (place.name == "first" and first) or (place.name == "last" and last)
        return self.ssm_total_bytes if here else 0


def device_bytes(kind: NodeKind) -> int:
    """Memory of one device of a node, less its reserve."""
    device = kind.device
    return int(device.memory_bytes.effective - device.reserve_bytes.effective)

"""The planning problem: models, machine, load and objective, and the choices that the search may make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from flexspec.arithmetic import ceil_div
from flexspec.compiler.artifact.ssm_place import EveryDevice, FirstStage, LastStage, NoSsm, SeparateDevices, SsmPlace
from flexspec.compiler.prices.acceptance_profile import OFF, DraftEntry
from flexspec.compiler.prices.machine import Machine, NodeKind
from flexspec.compiler.prices.memory import RankBytes, Workload, rank_bytes, ssm_bytes
from flexspec.compiler.prices.profile import ModelProfile
from flexspec.errors import PlanError

OBJECTIVES = ("latency", "throughput", "goodput")
MAX_REQUESTS = 4096
TIE = 1 + 1e-10  # values within this factor count as equal: the order of summation changes them by less


@dataclass(frozen=True, slots=True)
class Choice:
    """How rounds run on the stages of a plan."""

    entry: DraftEntry
    batch: int  # requests
    micro_batches: int  # in flight

    @property
    def micro(self) -> int:
        """Requests of a micro-batch."""
        return ceil_div(self.batch, self.micro_batches)


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal nodes that stages may use."""

    kind: int  # index of the machine's kind of nodes
    devices: int  # of each node that stages may use
    count: int  # nodes


@dataclass(frozen=True)
class Problem:
    """What to plan for. Raises PlanError for a load or an objective out of range."""

    machine: Machine
    llm: ModelProfile
    ssms: tuple[ModelProfile, ...]
    entries: tuple[DraftEntry, ...]  # of the acceptance profile; OFF is always available too
    requests: int  # at most, at the same time
    context_tokens: int  # of each request
    objective: str = "latency"
    limit_us: float = float("inf")  # most microseconds per token of a request (goodput)
    degrees: tuple[int, ...] = (1, 2, 4, 8)  # TP degrees to try

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= MAX_REQUESTS:
            raise PlanError(f"{self.requests} requests", f"1 to {MAX_REQUESTS}", "choose a number in that range")
        if not 1 <= self.context_tokens <= self.llm.config.max_positions:
            context, most = f"a context of {self.context_tokens} tokens", self.llm.config.max_positions
            raise PlanError(context, f"1 to {most}, the model's positions", "choose a length in that range")
        if self.objective not in OBJECTIVES:
            raise PlanError(f"objective {self.objective!r}", f"one of {', '.join(OBJECTIVES)}", "correct the name")

    @cached_property
    def legal_degrees(self) -> tuple[int, ...]:
        """Those of ``degrees`` to which the model can be cut."""
        return tuple(sorted(degree for degree in set(self.degrees) if degree in self.llm.ranks))

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes of the ladder: powers of two, and ``requests`` itself."""
        return tuple(dict.fromkeys([1 << i for i in range(self.requests.bit_length())] + [self.requests]))

    @cached_property
    def drafting(self) -> tuple[DraftEntry, ...]:
        """Draft plans that draft; none without an SSM."""
        return self.entries if self.ssms else ()

    @cached_property
    def workload(self) -> Workload:
        """The load that memory must hold, whatever rung of the ladder is in use."""
        largest = max((entry.most_rows for entry in self.drafting), default=1)
        return Workload(self.requests, self.context_tokens, largest)

    @property
    def tried_batches(self) -> tuple[int, ...]:
        """Batch sizes to choose from: for latency only the full one; other objectives may serve fewer requests."""
        return (self.requests,) if self.objective == "latency" else self.batches

    def ssm_bytes_at(self, place: SsmPlace) -> tuple[int, ...]:
        """Bytes of each SSM on one drafting device."""
        requests = place.requests_a_device(self.requests, self.machine.devices)
        return tuple(ssm_bytes(ssm, replace(self.workload, requests=requests)) for ssm in self.ssms)

    def kind(self, number: int) -> NodeKind:
        return self.machine.kinds[number]

    def places(self) -> list[SsmPlace]:
        """Every SSM place to try. Separate devices need a node with one device per SSM, and enough memory there."""
        places: list[SsmPlace] = [NoSsm()]
        if not self.drafting:
            return places
        for place in (SeparateDevices(number) for number in range(len(self.machine.kinds))):
            kind = self.machine.kinds[place.kind]
            enough = kind.devices >= len(self.ssms) and self.machine.devices > len(self.ssms)
            if enough and self.drafting_free_bytes(place) >= 0:
                places.append(place)
        places += [FirstStage(), LastStage()]
        share = sum(self.ssm_bytes_at(EveryDevice()))
        if self.machine.devices > 1 and all(share <= device_bytes(kind) for kind in self.machine.kinds):
            places.append(EveryDevice())
        return places

    def entries_at(self, place: SsmPlace) -> tuple[DraftEntry, ...]:
        return self.drafting if place.drafts else (OFF,)

    def offered_at(self, place: SsmPlace) -> tuple[DraftEntry, ...]:
        """Those of entries_at, and OFF."""
        return (OFF, *self.drafting) if place.drafts else (OFF,)

    def pools(self, place: SsmPlace) -> tuple[Pool, ...]:
        """Nodes available to stages. The last node of a kind lacks the devices reserved for SSMs."""
        pools = []
        for number, kind in enumerate(self.machine.kinds):
            reserved = place.reserved(number, len(self.ssms))
            if not reserved:
                pools.append(Pool(number, kind.devices, kind.count))
                continue
            if kind.count > 1:
                pools.append(Pool(number, kind.devices, kind.count - 1))
            if kind.devices > reserved:
                pools.append(Pool(number, kind.devices - reserved, 1))
        return tuple(pools)

    def stage_bytes(
        self, kind: int, degree: int, blocks: int, place: SsmPlace, *, first: bool, last: bool
    ) -> RankBytes:
        """Memory of the largest rank of a stage, including the SSMs that live there."""
        extra = self.extra_bytes(place, first=first, last=last)
        device = self.kind(kind).device
        return rank_bytes(self.llm, degree, blocks, self.workload, device, first=first, last=last, ssm=extra)

    def free_bytes(self, kind: int, degree: int, place: SsmPlace, *, first: bool, last: bool) -> tuple[int, int]:
        """(bytes that a stage without blocks leaves free, bytes of each block)."""
        none, one = (self.stage_bytes(kind, degree, n, place, first=first, last=last) for n in (0, 1))
        return none.free, none.free - one.free  # the memory function is linear in blocks

    def most_blocks(self, kind: int, degree: int, place: SsmPlace, *, first: bool, last: bool) -> int:
        """The most blocks that a stage can hold; -1 if it does not fit even without blocks."""
        room, per_block = self.free_bytes(kind, degree, place, first=first, last=last)
        return min(self.llm.blocks, room // per_block) if room >= 0 else -1

    def drafting_free_bytes(self, place: SsmPlace) -> float:
        """Bytes free on the fullest device that only drafts; inf if there is none."""
        if not place.separate:
            return math.inf
        kinds = [self.machine.kinds[number] for number in place.kinds_beside(len(self.machine.kinds))]
        return min(map(device_bytes, kinds)) - max(self.ssm_bytes_at(place))

    def extra_bytes(self, place: SsmPlace, *, first: bool, last: bool) -> int:
        """Bytes of SSMs on a rank of a stage."""
        return sum(self.ssm_bytes_at(place)) if place.lives_in(first=first, last=last) else 0


def micro_batch_counts(batch: int) -> list[int]:
    """Micro-batch counts to try: powers of two up to the batch, at most 16."""
    return [count for count in (1, 2, 4, 8, 16) if count <= batch]


def choices(entries: Sequence[DraftEntry], batches: Sequence[int], micro_batches: int | None = None) -> list[Choice]:
    """Every choice of draft plan, batch and micro-batch count; ``micro_batches`` fixes the count."""
    return [
        Choice(entry, batch, count)
        for entry in entries
        for batch in batches
        for count in (micro_batch_counts(batch) if micro_batches is None else (micro_batches,))
        if count <= batch
    ]


def device_bytes(kind: NodeKind) -> int:
    """Memory of one device of a node, minus its reserve."""
    device = kind.device
    return int(device.memory_bytes.effective - device.reserve_bytes.effective)

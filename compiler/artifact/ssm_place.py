"""Where SSMs live: five places, and what follows from each for memory, time, devices and ranks.

A place knows no machine and no prices: devices, bytes and requests are numbers that the caller has. No other file asks
for the name of a place; what differs between places is a field or a method here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flexspec.arithmetic import ceil_div

Devices = tuple[int, ...]  # or ranks: whatever numbers the caller counts in
UNKNOWN_KIND = -1


@dataclass(frozen=True, slots=True)
class SsmPlace:
    """What depends on the place. The defaults are those of a plan without SSMs."""

    name: ClassVar[str]  # in plan files
    words: ClassVar[str]  # for people
    drafts: ClassVar[bool] = True  # some SSM is used
    separate: ClassVar[bool] = False  # each SSM has a device that holds no stage, so that they run side by side
    in_every_stage: ClassVar[bool] = False  # drafting keeps the devices of every stage busy
    asked_first: ClassVar[bool] = False  # a message to other ranks before they draft, and one back
    asked_in_return: ClassVar[bool] = False  # the same, as part of what the last stage returns

    @property
    def label(self) -> str:
        """The place in a sentence about a plan."""
        return f"SSM {self.words}"

    def runs_in(self, *, first: bool, last: bool) -> bool:
        """Whether drafting is part of the time of a stage (``first``, ``last``: where the stage stands)."""
        return False

    def lives_in(self, *, first: bool, last: bool) -> bool:
        """Whether a rank of a stage holds the SSMs."""
        return self.runs_in(first=first, last=last)

    def requests_a_device(self, requests: int, devices: int) -> int:
        """Of ``requests``, those that one device drafts for."""
        return requests

    def kinds_beside(self, kinds: int) -> range:
        """The machine's kinds of nodes (of ``kinds``) whose devices draft before the first stage runs."""
        return range(0)

    def reserved(self, kind: int, ssms: int) -> int:
        """Devices of the last node of ``kind`` that stages may not use."""
        return 0

    def assign(
        self, stages: Sequence[Devices], ssms: int, *, separate: Sequence[int], every: Devices
    ) -> tuple[Devices, ...]:
        """The devices of each SSM. ``separate``: devices without a stage; ``every``: all that could draft."""
        return ()

    def agrees(self, stages: Sequence[Devices], ssm_ranks: Sequence[Devices]) -> bool:
        """Whether a plan's ranks of SSMs are those of this place."""
        return bool(ssm_ranks) and all(self._holds(stages, set(ranks)) for ranks in ssm_ranks)

    def _holds(self, stages: Sequence[Devices], ranks: set[int]) -> bool:
        return False

    def with_stages(self, stages: int) -> SsmPlace:
        """The same place in a plan of so many stages: an only stage is the first as well as the last."""
        return self


@dataclass(frozen=True, slots=True)
class NoSsm(SsmPlace):
    name: ClassVar[str] = "none"
    words: ClassVar[str] = "no SSM"
    drafts: ClassVar[bool] = False

    @property
    def label(self) -> str:
        return self.words

    def agrees(self, stages: Sequence[Devices], ssm_ranks: Sequence[Devices]) -> bool:
        return not ssm_ranks


@dataclass(frozen=True, slots=True)
class SeparateDevices(SsmPlace):
    """A device for each SSM, all on one node of the machine's kind number ``kind``."""

    name: ClassVar[str] = "own"
    words: ClassVar[str] = "on devices of their own"
    separate: ClassVar[bool] = True
    asked_first: ClassVar[bool] = True

    kind: int = UNKNOWN_KIND  # in plans, which name devices and no machine

    def kinds_beside(self, kinds: int) -> range:
        return range(self.kind, self.kind + 1)

    def reserved(self, kind: int, ssms: int) -> int:
        return ssms if kind == self.kind else 0

    def assign(
        self, stages: Sequence[Devices], ssms: int, *, separate: Sequence[int], every: Devices
    ) -> tuple[Devices, ...]:
        return tuple((device,) for device in separate)

    def _holds(self, stages: Sequence[Devices], ranks: set[int]) -> bool:
        return not any(ranks & set(stage) for stage in stages)


@dataclass(frozen=True, slots=True)
class FirstStage(SsmPlace):
    name: ClassVar[str] = "first"
    words: ClassVar[str] = "with stage 0"

    def runs_in(self, *, first: bool, last: bool) -> bool:
        return first

    def assign(
        self, stages: Sequence[Devices], ssms: int, *, separate: Sequence[int], every: Devices
    ) -> tuple[Devices, ...]:
        return (stages[0][:1],) * ssms

    def _holds(self, stages: Sequence[Devices], ranks: set[int]) -> bool:
        return ranks <= set(stages[0])


@dataclass(frozen=True, slots=True)
class LastStage(SsmPlace):
    name: ClassVar[str] = "last"
    words: ClassVar[str] = "on the last stage"
    asked_in_return: ClassVar[bool] = True

    def runs_in(self, *, first: bool, last: bool) -> bool:
        return last

    def assign(
        self, stages: Sequence[Devices], ssms: int, *, separate: Sequence[int], every: Devices
    ) -> tuple[Devices, ...]:
        return (stages[-1][:1],) * ssms

    def _holds(self, stages: Sequence[Devices], ranks: set[int]) -> bool:
        return ranks <= set(stages[-1])

    def with_stages(self, stages: int) -> SsmPlace:
        return FirstStage() if stages == 1 else self


@dataclass(frozen=True, slots=True)
class EveryDevice(SsmPlace):
    """Data parallel: every device has all SSMs, and drafts for an equal share of the requests."""

    name: ClassVar[str] = "all"
    words: ClassVar[str] = "data parallel over all devices"
    in_every_stage: ClassVar[bool] = True
    asked_first: ClassVar[bool] = True

    def lives_in(self, *, first: bool, last: bool) -> bool:
        return True

    def requests_a_device(self, requests: int, devices: int) -> int:
        return ceil_div(requests, devices)

    def kinds_beside(self, kinds: int) -> range:
        return range(kinds)

    def assign(
        self, stages: Sequence[Devices], ssms: int, *, separate: Sequence[int], every: Devices
    ) -> tuple[Devices, ...]:
        return (every,) * ssms

    def _holds(self, stages: Sequence[Devices], ranks: set[int]) -> bool:
        return all(set(stage) <= ranks for stage in stages)


PLACES = {place.name: place for place in (NoSsm, SeparateDevices, FirstStage, LastStage, EveryDevice)}


def place_named(name: str) -> SsmPlace:
    """The place of this name in a plan file; KeyError for any other."""
    return PLACES[name]()


def place_of_ranks(stages: Sequence[Devices], ssm_ranks: Sequence[Devices]) -> SsmPlace:
    """The place of a plan that names none, by the ranks of its first SSM."""
    if not ssm_ranks:
        return NoSsm()
    for place in (FirstStage(), LastStage()):
        if place.agrees(stages, ssm_ranks[:1]):
            return place
    return EveryDevice() if len(ssm_ranks[0]) > 1 else SeparateDevices()

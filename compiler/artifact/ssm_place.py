"""Where SSMs live: five places, and what each implies for memory, time, devices and ranks.

A place knows neither machines nor prices: the caller passes devices, bytes and requests as numbers. No other file
tests the name of a place; whatever differs between places is a field or a method here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flexspec.arithmetic import ceil_div

Devices = tuple[int, ...]  # or ranks: whatever the caller numbers
UNKNOWN_KIND = -1


@dataclass(frozen=True, slots=True)
class SsmPlace:
    """All that depends on the place. The defaults are those of a plan without SSMs."""

    name: ClassVar[str]  # in plan files
    words: ClassVar[str]  # in messages
    drafts: ClassVar[bool] = True  # some SSM is used
    separate: ClassVar[bool] = False  # each SSM has a device without a stage, so that SSMs run in parallel
    in_every_stage: ClassVar[bool] = False  # drafting occupies the devices of every stage
    draft_request_first: ClassVar[bool] = False  # other ranks get a draft request before the round, and reply
    draft_request_with_results: ClassVar[bool] = False  # the same, together with the results of the last stage

    @property
    def label(self) -> str:
        """The place in a sentence about a plan."""
        return f"SSM {self.words}"

    def runs_in(self, *, first: bool, last: bool) -> bool:
        """Whether drafting is part of the time of a stage; ``first``, ``last``: its position."""
        return False

    def lives_in(self, *, first: bool, last: bool) -> bool:
        """Whether a rank of the stage has the SSMs in memory."""
        return self.runs_in(first=first, last=last)

    def requests_a_device(self, requests: int, devices: int) -> int:
        """How many of the ``requests`` one device drafts for."""
        return requests

    def kinds_beside(self, kinds: int) -> range:
        """Which of the machine's ``kinds`` of nodes have devices that draft before the first stage runs."""
        return range(0)

    def reserved(self, kind: int, ssms: int) -> int:
        """Devices of the last node of ``kind`` that stages may not use."""
        return 0

    def assign(
        self, stages: Sequence[Devices], ssms: int, *, separate: Sequence[int], every: Devices
    ) -> tuple[Devices, ...]:
        """The devices of each SSM. ``separate``: devices reserved for SSMs; ``every``: all that could draft."""
        return ()

    def agrees(self, stages: Sequence[Devices], ssm_ranks: Sequence[Devices]) -> bool:
        """Whether the SSM ranks of a plan match this place."""
        return bool(ssm_ranks) and all(self._matches(stages, set(ranks)) for ranks in ssm_ranks)

    def _matches(self, stages: Sequence[Devices], ranks: set[int]) -> bool:
        return False

    def with_stages(self, stages: int) -> SsmPlace:
        """The same place in a plan of ``stages`` stages: a single stage is both first and last."""
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
    draft_request_first: ClassVar[bool] = True

    kind: int = UNKNOWN_KIND  # in plans, which name devices and no machine

    def kinds_beside(self, kinds: int) -> range:
        return range(self.kind, self.kind + 1)

    def reserved(self, kind: int, ssms: int) -> int:
        return ssms if kind == self.kind else 0

    def assign(
        self, stages: Sequence[Devices], ssms: int, *, separate: Sequence[int], every: Devices
    ) -> tuple[Devices, ...]:
        return tuple((device,) for device in separate)

    def _matches(self, stages: Sequence[Devices], ranks: set[int]) -> bool:
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

    def _matches(self, stages: Sequence[Devices], ranks: set[int]) -> bool:
        return ranks <= set(stages[0])


@dataclass(frozen=True, slots=True)
class LastStage(SsmPlace):
    name: ClassVar[str] = "last"
    words: ClassVar[str] = "on the last stage"
    draft_request_with_results: ClassVar[bool] = True

    def runs_in(self, *, first: bool, last: bool) -> bool:
        return last

    def assign(
        self, stages: Sequence[Devices], ssms: int, *, separate: Sequence[int], every: Devices
    ) -> tuple[Devices, ...]:
        return (stages[-1][:1],) * ssms

    def _matches(self, stages: Sequence[Devices], ranks: set[int]) -> bool:
        return ranks <= set(stages[-1])

    def with_stages(self, stages: int) -> SsmPlace:
        return FirstStage() if stages == 1 else self


@dataclass(frozen=True, slots=True)
class EveryDevice(SsmPlace):
    """Data parallel: every device has all SSMs and drafts for an equal share of the requests."""

    name: ClassVar[str] = "all"
    words: ClassVar[str] = "data parallel over all devices"
    in_every_stage: ClassVar[bool] = True
    draft_request_first: ClassVar[bool] = True

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

    def _matches(self, stages: Sequence[Devices], ranks: set[int]) -> bool:
        return all(set(stage) <= ranks for stage in stages)


PLACES = {place.name: place for place in (NoSsm, SeparateDevices, FirstStage, LastStage, EveryDevice)}


def place_named(name: str) -> SsmPlace:
    """The place that a plan file calls ``name``; KeyError for any other."""
    return PLACES[name]()


def place_of_ranks(stages: Sequence[Devices], ssm_ranks: Sequence[Devices]) -> SsmPlace:
    """The place of a plan that names none, derived from the ranks of its first SSM."""
    if not ssm_ranks:
        return NoSsm()
    for place in (FirstStage(), LastStage()):
        if place.agrees(stages, ssm_ranks[:1]):
            return place
    return EveryDevice() if len(ssm_ranks[0]) > 1 else SeparateDevices()

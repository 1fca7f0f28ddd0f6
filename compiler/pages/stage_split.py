"""What a stage's time in a round is spent on: operators, collectives, launch and hand over, drafting, messages.

The parts add up to the stage's time in rounds.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from flexspec.compiler.prices.cost import call_times
from flexspec.compiler.prices.machine import NodeKind
from flexspec.compiler.prices.profile import UNITS, Call
from flexspec.compiler.prices.rounds import Cut, Prices, RoundCost, StageExtras


@dataclass(frozen=True, slots=True)
class StageSplit:
    """What the time of one stage in a round of one micro-batch is spent on, in microseconds."""

    rows: int  # of the verify step
    operators_us: float  # reading weights and KV, and arithmetic
    collectives_us: float
    launch_us: float  # of every operator, and the host's handing the step over to the stage's ranks
    draft_us: float  # SSMs that live with the stage
    messages_us: float  # from and to rank 0, of a last stage that is not the first

    @property
    def total_us(self) -> float:
        return self.operators_us + self.collectives_us + self.launch_us + self.draft_us + self.messages_us

    def line(self) -> str:
        """The line of the page under the stage."""
        named = [
            ("weights, KV and arithmetic", self.operators_us),
            ("collectives", self.collectives_us),
            ("launch and hand over", self.launch_us),
            ("drafting", self.draft_us),
            ("messages", self.messages_us),
        ]
        parts = ", ".join(f"{name} {us / 1e3:.2f}" for name, us in named if us >= 5)  # shorter ones would be 0.00 ms
        return f"  {self.rows} row{'s' if self.rows > 1 else ''}: {parts} ms"

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def stage_splits(prices: Prices, cost: RoundCost, cuts: Sequence[Cut]) -> list[StageSplit]:
    """One for each stage of ``cuts``, whose round at ``prices`` is ``cost``."""
    final = len(cuts) - 1
    return [
        _split(prices, cut, stage.extras, first=i == 0, last=i == final)
        for i, (cut, stage) in enumerate(zip(cuts, cost.stages, strict=True))
    ]


def _split(prices: Prices, cut: Cut, extras: StageExtras, *, first: bool, last: bool) -> StageSplit:
    kind, model = prices.problem.kind(cut.kind), prices.problem.llm
    operators = collectives = launch = 0.0
    for unit, count in zip(UNITS, (int(first), cut.blocks, int(last)), strict=True):
        parts = _unit(prices, kind, model.ranks[cut.degree].calls[unit], cut.degree)
        operators, collectives, launch = (
            total + count * part_us for total, part_us in zip((operators, collectives, launch), parts, strict=True)
        )
    launch += extras.hand_over_us + extras.broadcast_us + extras.broadcast_host_us
    return StageSplit(prices.rows, operators, collectives, launch, extras.draft_us, extras.returned_us)


def _unit(prices: Prices, kind: NodeKind, calls: Sequence[Call], degree: int) -> tuple[float, float, float]:
    """Microseconds of a unit's (operators, collectives, launches)."""
    operators = collectives = launch = 0.0
    dtype = prices.problem.llm.dtype
    for call, us in call_times(kind.device, kind.link, dtype, calls, prices.sizes, degree):
        if call.record.exchange:
            collectives += us
        elif us:  # views take no time and launch nothing
            operators += us - kind.device.launch_us.effective
            launch += kind.device.launch_us.effective
    return operators, collectives, launch

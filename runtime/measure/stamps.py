"""From the stamps of all ranks to the lines of a round: the time of each stage, operator class, exchange and hop.

Ranks of a host share the steady clock, so the stamps of different ranks can be subtracted. Lines are those of
compiler/pages/predicted_lines.py, an array [steps] of microseconds each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.pages.predicted_lines import ALL, DRAFT, HAND_OVER, WAIT, Line, hop_part, stage_part
from flexspec.graph import Graph
from flexspec.ops.record import Collective, record_of

Steps = NDArray[np.float64]  # one number per step
JOIN = "combine"  # the line of the combine of logits, which a rank does after its program


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank's steps."""

    ops: tuple[str, ...]  # of the nodes
    calls_us: NDArray[np.float64]  # [steps, 2] as its caller saw them
    stamps_us: NDArray[np.float64]  # [steps, 1 + nodes]

    @classmethod
    def of(cls, graph: Graph, arrays: Mapping[str, NDArray[np.int64]], steps: NDArray[np.int64]) -> RankTimes:
        """The steps with numbers ``steps``, of the StepTimes.arrays of ``graph``'s program."""
        ops = tuple(node.op for node in graph.nodes)
        calls, stamps = arrays["calls"][steps] / 1e3, arrays["stamps"][steps] / 1e3
        return cls(ops, calls, stamps)

    @property
    def arriving(self) -> int:
        """How many nodes at the front only wait for the previous stage."""
        waits = (Collective.RECV, Collective.BROADCAST)
        return next((i for i, op in enumerate(self.ops) if record_of(op).collective not in waits), len(self.ops))

    @property
    def leaving(self) -> int:
        """The first of the nodes at the end that only send to the next stage."""
        count = len(self.ops)
        while count and record_of(self.ops[count - 1]).collective is Collective.SEND:
            count -= 1
        return count

    def begin_us(self) -> Steps:
        return self.stamps_us[:, self.arriving] if self.arriving else self.calls_us[:, 0]

    def end_us(self) -> Steps:
        return self.stamps_us[:, self.leaving] if self.leaving < len(self.ops) else self.calls_us[:, 1]


def stage_lines(ranks: Sequence[RankTimes]) -> tuple[dict[str, Steps], Steps, Steps]:
    """A stage's time between its begin and its end, by operator class; and both times.

    Classes are means over the ranks; in an exchange a rank also waits for the others. The first rank's time before
    the last one has begun is waiting too.
    """
    begins = np.stack([rank.begin_us() for rank in ranks])
    begin = begins.max(0) if ranks[0].arriving else begins.min(0)
    end = np.stack([rank.end_us() for rank in ranks]).max(0)
    lines: dict[str, Steps] = {}

    def add(what: str, values: Sequence[Steps]) -> None:
        lines[what] = lines.get(what, 0.0) + np.stack(values).mean(0)

    alone = len(ranks) == 1
    for i in range(ranks[0].arriving, ranks[0].leaving):
        add(ranks[0].ops[i], [rank.stamps_us[:, i + 1] - rank.stamps_us[:, i] for rank in ranks])
    if not ranks[0].arriving:
        add(HAND_OVER, [rank.stamps_us[:, 0] - rank.calls_us[:, 0] for rank in ranks])
    if ranks[0].leaving == len(ranks[0].ops):
        add(HAND_OVER if alone else JOIN, [rank.calls_us[:, 1] - rank.stamps_us[:, -1] for rank in ranks])
    if not alone:
        lines[WAIT] = end - begin - np.sum(list(lines.values()), 0)
    return lines, begin, end


def verify_lines(stages: Sequence[Sequence[RankTimes]]) -> dict[Line, Steps]:
    """All lines of a step through the stages."""
    lines: dict[Line, Steps] = {}
    before: Steps | None = None
    for number, ranks in enumerate(stages):
        of_stage, begin, end = stage_lines(ranks)
        lines |= {(stage_part(number), what): values for what, values in of_stage.items()}
        if before is not None:
            lines[hop_part(number - 1), ALL] = begin - before
        before = end
    return lines


def draft_lines(
    graph: Graph, arrays: Mapping[str, NDArray[np.int64]], rounds: Sequence[tuple[int, int]]
) -> dict[Line, Steps]:
    """Operator classes of an SSM's steps, summed by round; a round is the range [first, end) of its steps."""
    spans = [np.arange(first, end) for first, end in rounds]
    took = np.diff(arrays["stamps"], axis=1) / 1e3
    lines: dict[Line, Steps] = {}
    for i, node in enumerate(graph.nodes):
        line = DRAFT, node.op
        lines[line] = lines.get(line, 0.0) + np.array([took[span, i].sum() for span in spans])
    return lines


def complete(lines: dict[Line, Steps], part: str, what: str, total_us: Steps) -> None:
    """Add a line to ``part`` that makes its sum ``total_us``."""
    known = [values for (line_part, _), values in lines.items() if line_part == part]
    lines[part, what] = total_us - (np.sum(known, 0) if known else 0.0)


def quartile_mean(lines: Mapping[Line, Steps]) -> tuple[dict[Line, float], int]:
    """The mean of every line over the quarter of the rounds around the lower quartile, and their number.

    Means add up, which quantiles do not; what else runs on the machine only ever adds time.
    """
    total = np.sum(list(lines.values()), 0)
    order = np.argsort(total, kind="stable")
    count = len(order)
    middle = order[count // 8 : max(count // 8 + 1, 3 * count // 8)]
    return {line: float(values[middle].mean()) for line, values in lines.items()}, len(middle)

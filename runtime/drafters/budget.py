"""How many nodes are worth verifying, and when to stop speculating altogether.

Owns the choice of a round's node count from survival chances and step costs, and the switch that turns speculation
off when it does not pay and tries again later. Costs are relative: 1.0 is a step with one row per request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHING = 0.1  # weight of a new measurement in the running means of times and counts


@dataclass(frozen=True, slots=True)
class StepCost:
    """Relative cost of an LLM step by its rows (all requests), linear between measured points, never falling."""

    rows: tuple[int, ...]
    costs: tuple[float, ...]

    @classmethod
    def from_points(cls, points: Sequence[tuple[int, float]]) -> StepCost:
        """From measured (rows, seconds or any unit); noise that would make more rows cheaper is flattened."""
        assert points and all(rows > 0 and cost > 0 for rows, cost in points)
        rising: list[tuple[int, float]] = []
        for rows, cost in sorted(dict(points).items()):
            rising.append((rows, max(cost, rising[-1][1]) if rising else cost))
        unit = rising[0][1]
        return cls(tuple(rows for rows, _ in rising), tuple(cost / unit for _, cost in rising))

    def __call__(self, rows: int) -> float:
        """Cost of ``rows``; beyond the last point it is proportional to the rows."""
        at = bisect_left(self.rows, rows)
        if at == 0:
            return self.costs[0]
        if at < len(self.rows):
            left, right = self.rows[at - 1], self.rows[at]
            share = (rows - left) / (right - left)
            return self.costs[at - 1] + share * (self.costs[at] - self.costs[at - 1])
        return self.costs[-1] * rows / self.rows[-1]


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of the drafts a round verifies."""

    nodes: tuple[int, ...]  # drafted nodes, by request
    tokens_per_cost: float  # expected of the round


def choose_budget(survival: Sequence[Sequence[float]], step_cost: StepCost, draft_cost: float = 0.0) -> Budget:
    """Node counts that maximise expected committed tokens over cost, all requests of the step together.

    ``survival[r]`` are request r's drafted nodes, best first; each node adds its survival to the expectation and a row
    to the step, so the best n nodes of the whole step are the n most promising ones wherever they are. ``draft_cost``
    is the round's drafting in units of ``step_cost``, spent whatever is verified. All zeros when no draft pays.
    """
    requests = len(survival)
    ranked = sorted([(-chance, r, i) for r, chances in enumerate(survival) for i, chance in enumerate(chances)])
    expected = float(requests)
    best_count = 0
    best_rate = expected / (step_cost(requests) + draft_cost) if requests else 0.0
    for count, (negative, _, _) in enumerate(ranked, 1):
        expected -= negative
        rate = expected / (step_cost(requests + count) + draft_cost)
        if rate > best_rate * (1.0 + 1e-12):
            best_rate, best_count = rate, count
    nodes = [0] * requests
    for _, r, _ in ranked[:best_count]:
        nodes[r] += 1
    return Budget(tuple(nodes), best_rate)


WINDOW_ROUNDS = 1_000  # request-rounds pooled before a verdict
MIN_TOKENS_PER_ROUND = 1.05
RETRY_ROUNDS = 2_000  # plain request-rounds before the first retry; doubles with each failure
MAX_RETRY_ROUNDS = 64_000
_PLAIN_SMOOTHING = 0.05  # weight of a new plain step in the baseline


class SpeculationSwitch:
    """Turns speculation off when pooled rounds commit too little or take longer than plain decoding would.

    Feed it every step; read ``enabled`` before drafting. Plain step times are learned per number of requests from
    ``record_plain``; without any for a batch size, only the token count can turn it off.
    """

    def __init__(self) -> None:
        self.enabled = True
        self.switched_off = 0
        self.reason = ""
        self._plain_seconds: dict[int, float] = {}
        self._retry_rounds = RETRY_ROUNDS
        self._plain_left = 0
        self._reset()

    def _reset(self) -> None:
        self._rounds = self._tokens = 0
        self._seconds = self._plain_equivalent_s = 0.0

    def record_round(self, requests: int, committed_tokens: int, seconds: float) -> None:
        """One speculative step of ``requests`` requests: draft, verify and commit took ``seconds``."""
        self._rounds += requests
        self._tokens += committed_tokens
        plain_s = self._plain_seconds.get(requests)
        if plain_s is not None and requests:
            self._seconds += seconds
            self._plain_equivalent_s += plain_s * committed_tokens / requests
        if self._rounds >= WINDOW_ROUNDS:
            self._judge()

    def record_plain(self, requests: int, seconds: float) -> None:
        """One step without drafts: its time is the baseline, and it brings the retry nearer."""
        have = self._plain_seconds.get(requests)
        self._plain_seconds[requests] = seconds if have is None else have + _PLAIN_SMOOTHING * (seconds - have)
        if not self.enabled:
            self._plain_left -= requests
            if self._plain_left <= 0:
                self.enabled, self.reason = True, ""
                self._reset()

    def _judge(self) -> None:
        rate = self._tokens / self._rounds
        if rate < MIN_TOKENS_PER_ROUND:
            self._switch_off(f"{rate:.2f} tokens a round over {self._rounds} rounds")
        elif self._seconds > 0.0 and self._plain_equivalent_s <= self._seconds:
            gain = self._plain_equivalent_s / self._seconds
            self._switch_off(f"{gain:.2f} times the speed of plain decoding over {self._rounds} rounds")
        else:
            self._retry_rounds = RETRY_ROUNDS
        self._reset()

    def _switch_off(self, reason: str) -> None:
        self.enabled, self.reason = False, reason
        self.switched_off += 1
        self._plain_left = self._retry_rounds
        self._retry_rounds = min(2 * self._retry_rounds, MAX_RETRY_ROUNDS)

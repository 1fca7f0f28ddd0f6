"""Whether the next step of an SSM pays: measured, not assumed, and decided again in every round.

A model drafter adds tokens to a round and time to it. The chance that its next step gains anything is known before it
runs: for the first level, that the cheaper sources miss the next token; deeper, that the text reaches a node that would
be extended. Owns how many tokens such a chance has brought lately, and what a step and a token cost in seconds.
"""

from __future__ import annotations

from collections.abc import Collection

from flexspec.runtime.drafters.budget import SMOOTHING
from flexspec.tree import TokenTree

PROBE_EVERY = 32  # a level skipped this often in a row is tried again: the text or the machine may have changed
_DECAY = 0.98  # of a level's past per round in which it ran
_PRIOR_CHANCE, _PRIOR_TOKENS = 4.0, 2.0  # of a new level: half a token per certain chance


class _LevelWorth:
    """Cost and gain of one level of the SSM's tree."""

    __slots__ = ("chance", "chance_now", "seconds", "skipped", "tokens", "tokens_now")

    def __init__(self) -> None:
        self.chance, self.tokens = _PRIOR_CHANCE, _PRIOR_TOKENS
        self.chance_now = self.tokens_now = 0.0  # of the round in flight
        self.seconds = 0.0  # 0 = never run
        self.skipped = 0


class StepWorth:
    """Of one SSM. Each round calls ``begin_round``, ``ask`` and ``ran`` per level, and ``accepted`` per verified tree.

    ``by_level`` False: all levels count as one, the first.
    """

    def __init__(self, source: str, *, by_level: bool = True) -> None:
        self._source, self._by_level = source, by_level
        self._levels: list[_LevelWorth] = []
        self._token_s = 0.0  # 0 = unknown

    def begin_round(self, tokens: int, seconds: float | None) -> None:
        """Close the previous round, which committed ``tokens`` (all requests) in ``seconds`` (None: not comparable)."""
        for level in self._levels:
            if level.chance_now > 0.0:
                level.chance = _DECAY * level.chance + level.chance_now
                level.tokens = _DECAY * level.tokens + level.tokens_now
                level.chance_now = level.tokens_now = 0.0
        if seconds is not None and tokens > 0:
            self._token_s += (SMOOTHING if self._token_s else 1.0) * (seconds / tokens - self._token_s)

    def ask(self, level: int, chance: float) -> bool:
        """Whether a step for ``level`` (0 = children of the root) pays; ``chance``: that its nodes matter, summed."""
        known = self._level(level)
        pays = not (known.seconds and self._token_s) or self.gain(level, chance) * self._token_s >= known.seconds
        known.skipped = 0 if pays else known.skipped + 1
        if known.skipped >= PROBE_EVERY:
            known.skipped, pays = 0, True
        if pays:
            known.chance_now += chance
        return pays

    def ran(self, level: int, seconds: float) -> None:
        """Record that a step which ``ask`` allowed took ``seconds``, its Python included."""
        known = self._level(level)
        known.seconds += (SMOOTHING if known.seconds else 1.0) * (seconds - known.seconds)

    def accepted(self, tree: TokenTree, nodes: Collection[int]) -> None:
        """Credit each level with the accepted nodes that no other source had proposed."""
        for node in nodes:
            if tree.sources[node] == self._source:
                self._level(tree.depths[node] - 1 if self._by_level else 0).tokens_now += 1.0

    def gain(self, level: int, chance: float) -> float:
        """Tokens expected from a step of ``level``."""
        known = self._level(level)
        return known.tokens / known.chance * chance

    def _level(self, level: int) -> _LevelWorth:
        while len(self._levels) <= level:
            self._levels.append(_LevelWorth())
        return self._levels[level]

"""Whether the SSMs pay: measured, not assumed.

A model drafter adds tokens to a round and time to it; which wins depends on the machine (drafting is dear where memory
is slow) and on the text. Rounds run in blocks with or without the SSMs; the better measured rate of tokens a second
gets most blocks, the other one block in eight, so that a change is noticed. Owns the choice only.
"""

from __future__ import annotations

BLOCK_ROUNDS = 8
EXPLORE_EVERY = 8  # blocks
_DECAY = 0.99  # weight of the past a round: an arm remembers about its last hundred rounds


class SourceChoice:
    """``with_models`` says whether the next round asks the SSMs. Both ways get one block before they are compared."""

    def __init__(self) -> None:
        self.with_models = True
        self._tokens = {True: 0.0, False: 0.0}
        self._seconds = {True: 0.0, False: 0.0}
        self._rounds = self._blocks = 0

    def record(self, tokens: int, seconds: float) -> None:
        """One round as it was chosen: tokens committed (all requests) and its wall time."""
        arm = self.with_models
        self._tokens[arm] = _DECAY * self._tokens[arm] + tokens
        self._seconds[arm] = _DECAY * self._seconds[arm] + seconds
        self._rounds += 1
        if self._rounds % BLOCK_ROUNDS == 0:
            self._blocks += 1
            self.with_models = self._next_arm()

    def _next_arm(self) -> bool:
        if self._blocks == 1:
            return False
        better = self.rate(True) >= self.rate(False)
        return better if self._blocks % EXPLORE_EVERY else not better

    def rate(self, with_models: bool) -> float:
        """Tokens a second of one way, lately; 0 when it was never tried."""
        seconds = self._seconds[with_models]
        return self._tokens[with_models] / seconds if seconds > 0.0 else 0.0

"""What an SSM's drafter keeps: a request's state from round to round, and its work within one round."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexspec.draft_plan import Expansion
from flexspec.runtime.acceptance.noise import DraftNoise
from flexspec.runtime.drafters.base import DraftRequest
from flexspec.runtime.drafters.expand import Growth


@dataclass(slots=True)
class Context:
    """One request in the SSM. ``pending`` tokens are committed but not cached; ``cached`` rows are.

    ``next_position`` is the sequence position of the next token to become pending. ``prompt`` is held by a fused-state
    SSM until the features of its rows have come.
    """

    next_position: int = 0
    prompt: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    features: list[NDArray[np.float32]] = field(default_factory=list)  # one for each pending token
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    last: tuple[int, NDArray[np.float32] | None] | None = None  # newest cached token and its feature
    given_up: bool = False

    def restart(self, position: int) -> None:
        """Forget all rows: the next token fed has sequence position ``position``."""
        self.pending.clear()
        self.features.clear()
        self.cached = 0
        self.last = None
        self.next_position = position


@dataclass(slots=True)
class Job:
    """One request of a ``propose`` call."""

    place: int  # in the caller's list
    request: DraftRequest
    context: Context
    growth: Growth
    expansion: Expansion
    noise: DraftNoise | None  # draws one child a node; None: all children are the most likely ones

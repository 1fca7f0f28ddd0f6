"""The state of an SSM's drafter: a request's from round to round, and its work within one round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexspec.draft_plan import Expansion
from flexspec.runtime.acceptance.noise import DraftNoise
from flexspec.runtime.drafters.base import DraftRequest
from flexspec.runtime.drafters.expand import Growth


@dataclass(slots=True)
class Context:
    """One request in the SSM: a run of its committed tokens, the older ones in the cache, the newer ones to be fed.

        sequence position   first_position        next_to_feed          next_position
                                 | cached slots 0 ..   | pending ...         | not known here yet
        cache slot               0                     cached

    Between calls every position from ``first_position`` to below ``next_position`` is either cached or pending, each
    once and in order: positions are derived from the three, never counted separately. ``newest`` is known whenever
    tokens were fed and none is pending, so that a root can be fed once more.
    """

    first_position: int = 0  # of cache slot 0: above 0 where the beginning was never seen
    cached: int = 0  # rows of committed tokens in the cache
    pending: list[int] = field(default_factory=list)
    features: list[NDArray[np.float32]] = field(
        default_factory=list
    )  # of a fused-state SSM, one for each pending token
    newest: tuple[int, NDArray[np.float32] | None] | None = None  # newest cached token, and its feature
    pages: list[int] = field(default_factory=list)  # of at least the cached slots
    prompt: list[int] = field(default_factory=list)  # of a fused-state SSM, until the features of its rows have come
    given_up: bool = False  # the SSM has no positions left for it

    @property
    def next_to_feed(self) -> int:
        """Sequence position of the first pending token."""
        return self.first_position + self.cached

    @property
    def next_position(self) -> int:
        """Sequence position of the next token to become pending."""
        return self.next_to_feed + len(self.pending)

    @property
    def root_position(self) -> int:
        """Sequence position of the newest token: the root of a draft."""
        return self.next_position - 1

    def restart(self, position: int) -> None:
        """Forget all rows: the next token fed has sequence position ``position``."""
        self.pending.clear()
        self.features.clear()
        self.cached = 0
        self.newest = None
        self.first_position = position

    def append(self, tokens: Sequence[int], features: Iterable[NDArray[np.float32]] = ()) -> None:
        """Add newly committed tokens, with their features for a fused-state SSM."""
        self.pending.extend(tokens)
        self.features.extend(features)

    def feed(self, count: int) -> tuple[list[int], list[NDArray[np.float32]]]:
        """Move ``count`` pending tokens into the cache, and return them and their features for the caller's step."""
        tokens, features = self.pending[:count], self.features[:count]
        del self.pending[:count], self.features[:count]
        self.cached += count
        self.newest = (tokens[-1], features[-1] if features else None)
        return tokens, features

    def feed_root_again(self) -> bool:
        """If nothing is pending, make the newest cached token pending; False if there is none."""
        if not self.pending and self.newest is not None:
            token, feature = self.newest
            self.append([token], [] if feature is None else [feature])
            self.cached -= 1
            self.newest = None
        return bool(self.pending)


@dataclass(slots=True)
class DraftJob:
    """One request of a ``propose`` call."""

    place: int  # in the caller's list
    request: DraftRequest
    context: Context
    growth: Growth
    expansion: Expansion
    noise: DraftNoise | None  # draws one child of each node; None: all children are the most likely ones

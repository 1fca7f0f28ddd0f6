"""Every random number of the runtime, and how a token is drawn from a law.

Owns the streams: Philox keyed by (seed, purpose, position). Drafting, accepting and sampling never share one; when they
do, the output's distribution is wrong by a lot and nothing crashes (vllm#47386 measured a chi-square of 1585 against a
limit near 70). A *position* is the index of a token in its sequence, prompt included.

Rules ask for decisions (``accepts``, ``draw``), not for numbers, so that a test can take every branch of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np

from flexspec.runtime.acceptance.transforms import LawV

_MASK64 = (1 << 64) - 1
_BLOCK = 256


class Purpose(IntEnum):
    """What a stream is for. Never renumber: the output of a seed depends on the numbers."""

    DRAFT = 1
    ACCEPT = 2
    SAMPLE = 3


def stream(seed: int, purpose: Purpose, position: int, lane: int = 0) -> np.random.Generator:
    """The stream of (seed mod 2**64, purpose, position); drafters that sample side by side take a ``lane`` each.

    Seed, purpose and lane are the cipher's key and position the high half of its counter: no two streams overlap
    before one has produced 2**130 numbers.
    """
    assert position >= 0 and 0 <= lane < 1 << 32
    key = np.array([seed & _MASK64, int(purpose) << 32 | lane], np.uint64)
    counter = np.array([0, 0, position, 0], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def draw_token(law_V: LawV, uniform: float) -> int:
    """The token at ``uniform`` in [0, 1) of the law's cumulative sum; never one of probability 0.

    Sums of blocks first, then inside one block: a running sum over a whole vocabulary takes ten times longer.
    """
    blocks = np.add.reduceat(law_V, np.arange(0, len(law_V), _BLOCK)).cumsum()
    block, rest = _locate(blocks, uniform * float(blocks[-1]))
    tokens = law_V[block * _BLOCK : (block + 1) * _BLOCK].cumsum()
    return block * _BLOCK + _locate(tokens, rest)[0]


def _locate(cumulative: LawV, target: float) -> tuple[int, float]:
    """(index of the positive part that covers ``target``, distance into it)."""
    at = int(np.searchsorted(cumulative, target, side="right"))
    if at == len(cumulative):  # rounding took the target to the sum: the last positive part
        at = int(np.searchsorted(cumulative, cumulative[-1]))
    return at, target - (float(cumulative[at - 1]) if at else 0.0)


class Draws(Protocol):
    """Draws tokens, each independently."""

    def draw(self, law_V: LawV, depth: int) -> int:
        """A token from ``law_V``, as a child of a node at ``depth`` (the root has 0)."""
        ...


class Decisions(Draws, Protocol):
    """The random decisions of an acceptance rule."""

    def accepts(self, chance: float) -> bool:
        """True with probability ``chance``."""
        ...


class DraftNoise:
    """Draws for drafting the round whose first new token has index ``position``."""

    def __init__(self, seed: int, position: int, lane: int = 0) -> None:
        self._stream = stream(seed, Purpose.DRAFT, position, lane)

    def draw(self, law_V: LawV, depth: int) -> int:
        return draw_token(law_V, self._stream.random())


class RoundNoise:
    """Decisions for accepting the round whose first new token has index ``position``.

    The token with index i in the sequence is always drawn with stream (seed, SAMPLE, i), whatever the round and the
    tree: rule "match" then gives the same bytes as decoding without drafts.
    """

    def __init__(self, seed: int, position: int) -> None:
        self._seed = seed
        self._position = position
        self._accept: np.random.Generator | None = None

    def accepts(self, chance: float) -> bool:
        self._accept = self._accept or stream(self._seed, Purpose.ACCEPT, self._position)
        return self._accept.random() < chance

    def draw(self, law_V: LawV, depth: int) -> int:
        return draw_token(law_V, stream(self._seed, Purpose.SAMPLE, self._position + depth).random())


def draft_child(law_V: LawV, siblings: Sequence[int], noise: Draws, depth: int) -> tuple[int, LawV] | None:
    """The sampled child of a node at ``depth``: its token and its law. ``siblings``: the deterministic children.

    The law is ``law_V`` without ``siblings``, renormalised: what TokenTree.laws must hold for the child's node. None
    when nothing else has any probability.
    """
    rest_V = law_V.copy()
    rest_V[list(siblings)] = 0.0
    mass = float(rest_V.sum())
    if mass <= 0.0:
        return None
    rest_V /= mass
    return noise.draw(rest_V, depth), rest_V

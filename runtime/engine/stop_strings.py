"""Stop strings in a growing text: what may be shown now, what must wait, where the text ends.

Owns the matching only; commit.py decides what a match means. The text is read character by character, so the
result does not depend on token boundaries. If several stops could match, the one that completes first wins;
of those complete at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Knuth-Morris-Pratt for several strings at once; ``reached[i]`` characters of stop i end the text read so far."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._fallback = [_fallback_table(stop) for stop in self._stops]
        self._reached = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that can no longer be part of a stop string, whether one is complete).

        At a match the text before it is returned; the match and everything after it are dropped for good.
        """
        if not self._stops:
            return text, False
        self._held += text
        start = len(self._held) - len(text)
        for at in range(start, len(self._held)):
            matched = max((self._advance(i, self._held[at]) for i in range(len(self._stops))), default=0)
            if matched:
                shown, self._held = self._held[: at + 1 - matched], ""
                return shown, True
        keep = max(self._reached)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """The text held back, once no more can come."""
        shown, self._held = self._held, ""
        self._reached = [0] * len(self._stops)
        return shown

    def _advance(self, i: int, character: str) -> int:
        """Read one character for stop i; its length when that completes it, else 0."""
        stop, fallback, reached = self._stops[i], self._fallback[i], self._reached[i]
        while reached and stop[reached] != character:
            reached = fallback[reached - 1]
        reached += stop[reached] == character
        self._reached[i] = reached
        return len(stop) if reached == len(stop) else 0


def _fallback_table(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    for at in range(1, len(stop)):
        reached = table[at - 1]
        while reached and stop[reached] != stop[at]:
            reached = table[reached - 1]
        table[at] = reached + (stop[reached] == stop[at])
    return table

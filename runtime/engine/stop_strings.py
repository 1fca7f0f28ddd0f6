"""Stop strings in a growing text: what may be shown now, what must wait, where the text ends.

Owns the matching only; commit.py decides what a match means. The text is read character by character, so the
result does not depend on token boundaries. If several stops could match, the one that completes first wins;
of those complete at the same character, the longest. A special token's text is not shown, but stops may name it: a stop
matches in the text with such tokens spelt out as well as in the text that is shown.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Two searches, one over all characters and one over those shown; they differ after the first hidden one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._all = _Search(stops)
        self._visible: _Search | None = None  # None: nothing was hidden so far
        self._held = ""
        self._hidden: set[int] = set()  # characters of ``_held`` that are never shown

    def push(self, text: str, hidden: str = "") -> tuple[str, bool]:
        """(text that can no longer be part of a stop string, whether one is complete); ``hidden`` follows ``text``.

        At a match the text before it is returned; the match and everything after it are dropped for good.
        """
        if not self._all.stops:
            return text, False
        if hidden and self._visible is None:
            self._visible = self._all.copy()
        start, shown_end = len(self._held), len(self._held) + len(text)
        self._held += text + hidden
        self._hidden.update(range(shown_end, len(self._held)))
        for at in range(start, len(self._held)):
            first = at + 1 - self._all.advance(self._held[at])
            if self._visible is not None and at < shown_end:
                first = min(first, self._back(at + 1, self._visible.advance(self._held[at])))
            if first <= at:
                return self._take(first, len(self._held)), True
        end = len(self._held)
        keep = end - self._all.longest
        if self._visible is not None:
            keep = min(keep, self._back(end, self._visible.longest))
        return self._take(keep, keep), False

    def flush(self) -> str:
        """The text held back, once no more can come."""
        self._all, self._visible = _Search(self._all.stops), None
        return self._take(len(self._held), len(self._held))

    def _back(self, end: int, count: int) -> int:
        """Where the last ``count`` shown characters before ``end`` begin."""
        while count:
            end -= 1
            count -= end not in self._hidden
        return end

    def _take(self, end: int, drop: int) -> str:
        """The characters before ``end`` that are shown; those before ``drop`` are forgotten."""
        taken = self._held[:end]
        if self._hidden:
            taken = "".join(char for at, char in enumerate(taken) if at not in self._hidden)
            self._hidden = {at - drop for at in self._hidden if at >= drop}
        self._held = self._held[drop:]
        return taken


class _Search:
    """Knuth-Morris-Pratt for several strings at once; ``reached[i]`` characters of stop i end the text read so far."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._fallback = [_fallback_table(stop) for stop in self.stops]
        self._reached = [0] * len(self.stops)

    def copy(self) -> _Search:
        made = _Search(self.stops)
        made._reached = list(self._reached)
        return made

    @property
    def longest(self) -> int:
        """Characters at the end of the text that may still become a stop."""
        return max(self._reached)

    def advance(self, character: str) -> int:
        """Read one character; the length of the longest stop that it completes, else 0."""
        return max([self._advance(i, character) for i in range(len(self.stops))])

    def _advance(self, i: int, character: str) -> int:
        stop, fallback, reached = self.stops[i], self._fallback[i], self._reached[i]
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

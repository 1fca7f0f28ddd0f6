"""Drafts by copying: a suffix automaton over the prompt and the request's own output.

Owns the automaton and the drafter on top of it. The suffix link of the newest state is, by construction, the longest
suffix of the text that has occurred before, so the longest match costs nothing to find (Blumer et al. 1985; used for
drafting in SAM-Decoding, arXiv 2411.10666). Pure Python, amortised constant time per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from flexspec.runtime.drafters.base import DraftRequest
from flexspec.runtime.drafters.best_first import grow_best_first
from flexspec.runtime.drafters.make import DrafterInputs
from flexspec.tree import TokenTree

# Claimed chance that the token after a match of 1, 2, ... tokens repeats; longer matches use the last entry. A starting
# point only: runtime/drafters/calibrate.py replaces it with measured rates.
CONFIDENCE = (0.0, 0.20, 0.40, 0.60, 0.70, 0.80, 0.85, 0.90, 0.92)
MAX_DEPTH = 16  # deepest copy proposed in one round
WINDOW_TOKENS = 16_384  # newest prompt tokens indexed; about 0.6 KB of state per token
COUNT_STEPS = 24  # link steps per token that update counts; a bound for texts like "aaaa", where links form a chain
FAN_OUT = 4  # distinct continuations kept at a node
CROWDED = 64  # a one-token match with more continuations than this says nothing


class SuffixAutomaton:
    """Online suffix automaton of a token text with occurrence counts.

    State 0 is the empty string. ``link[last]`` is the state of the longest suffix seen before; ``count`` and ``end``
    are the number and the latest end position of a state's occurrences (exact unless COUNT_STEPS cut the walk).
    """

    __slots__ = ("count", "end", "last", "length", "link", "next", "size")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self.end = [0]
        self.last = 0
        self.size = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        nexts, link, length, count, end = self.next, self.link, self.length, self.count, self.end
        last, size = self.last, self.size
        for token in tokens:
            size += 1
            state = len(nexts)
            nexts.append({})
            length.append(size)
            count.append(0)
            end.append(size)
            link.append(0)
            walk = last
            while walk != -1 and token not in nexts[walk]:
                nexts[walk][token] = state
                walk = link[walk]
            if walk != -1:
                target = nexts[walk][token]
                link[state] = target if length[target] == length[walk] + 1 else self._clone(walk, token, target)
            walk, steps = state, COUNT_STEPS
            while walk > 0 and steps:
                count[walk] += 1
                end[walk] = size
                walk = link[walk]
                steps -= 1
            last = state
        self.last, self.size = last, size

    def _clone(self, walk: int, token: int, target: int) -> int:
        """Split ``target``: its strings up to length[walk] + 1 get a state of their own. Returns that state."""
        nexts, link, length = self.next, self.link, self.length
        clone = len(nexts)
        nexts.append(nexts[target].copy())
        length.append(length[walk] + 1)
        link.append(link[target])
        self.count.append(self.count[target])
        self.end.append(self.end[target])
        while walk != -1 and nexts[walk].get(token) == target:
            nexts[walk][token] = clone
            walk = link[walk]
        link[target] = clone
        return clone

    def continuations(self, state: int) -> list[tuple[int, int]]:
        """``(token, state)`` of the tokens that followed the state's strings: most frequent first, then most recent."""
        count, end = self.count, self.end
        ranked = list(self.next[state].items())
        if len(ranked) > 1:
            ranked.sort(key=lambda item: (-count[item[1]], -end[item[1]], item[0]))
        return ranked


_Continuation = tuple[int, float, int, int]  # token, claimed chance, its state, tokens matched once it is accepted


def expand_matches(automaton: SuffixAutomaton, root: int, max_nodes: int, max_depth: int) -> TokenTree:
    """Best-first tree of the continuations of the longest match, at most ``max_nodes`` drafted nodes.

    A node at depth d extends the match by d tokens, so its claimed chance is that of a match that long, shared among
    the continuations by their counts. At the root two shorter matches add the tokens the longest one never saw.
    """

    def expand(_: None, continuation: _Continuation) -> tuple[None, list[_Continuation]]:
        return None, _behind(automaton, continuation[2], continuation[3])

    depth = min(max_depth, MAX_DEPTH)
    return grow_best_first("suffix", root, None, _behind_text(automaton), expand, max_nodes, depth)


def _behind_text(automaton: SuffixAutomaton) -> list[_Continuation]:
    """Continuations of the text: of its longest match and two shorter ones, the most likely first."""
    continuations: list[_Continuation] = []
    seen: set[int] = set()
    state, rest = automaton.link[automaton.last], 1.0
    for _ in range(3):
        if state <= 0:
            break
        for continuation in _behind(automaton, state, automaton.length[state], rest):
            if continuation[0] not in seen:
                seen.add(continuation[0])
                continuations.append(continuation)
        rest *= 1.0 - _confidence(automaton.length[state])
        state = automaton.link[state]
    continuations.sort(key=_falling_chance)
    return continuations


def _falling_chance(continuation: _Continuation) -> float:
    return -continuation[1]


def _behind(automaton: SuffixAutomaton, state: int, match: int, mass: float = 1.0) -> list[_Continuation]:
    """Continuations of ``state`` when ``match`` tokens of it are matched, with ``mass`` to share between them."""
    nexts = automaton.next
    while not nexts[state]:  # the end of the text: continue with the longest suffix that has a continuation (periods)
        state = automaton.link[state]
        if state <= 0:
            return []
        match = min(match, automaton.length[state])
    if match == 1 and len(nexts[state]) > CROWDED:
        return []
    ranked = automaton.continuations(state)
    confidence = mass * _confidence(match)
    if len(ranked) == 1:
        return [(ranked[0][0], confidence, ranked[0][1], match + 1)]
    count = automaton.count
    total = sum([count[target] for _, target in ranked]) or 1
    return [
        (token, confidence * count[target] / total, target, match + 1)
        for token, target in ranked[:FAN_OUT]
        if count[target]
    ]


def _confidence(match: int) -> float:
    return CONFIDENCE[match] if match < len(CONFIDENCE) else CONFIDENCE[-1]


class SuffixDrafter:
    """Copies continuations of the longest suffix match inside each request's own text."""

    name = "suffix"
    reads_features = False

    def __init__(self) -> None:
        self._texts: dict[int, SuffixAutomaton] = {}

    def begin(self, request_id: int, prompt_ids: Sequence[int]) -> None:
        self._texts[request_id] = SuffixAutomaton(prompt_ids[-WINDOW_TOKENS:])

    def observe_prompt(self, request_id: int, start: int, features_KE: NDArray[np.float32] | None) -> None:
        """Nothing to learn: this drafter reads tokens only."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [self._propose_one(request) for request in requests]

    def _propose_one(self, request: DraftRequest) -> TokenTree:
        text = self._texts.get(request.request_id)
        if text is None or not text.size or text.link[text.last] <= 0:
            return TokenTree.root_only(request.last_token)
        return expand_matches(text, request.last_token, request.max_nodes, request.max_depth)

    def observe(self, request_id: int, committed: Sequence[int], features_KE: NDArray[np.float32] | None) -> None:
        text = self._texts.get(request_id)
        if text is not None:
            text.extend(committed)

    def end(self, request_id: int) -> None:
        self._texts.pop(request_id, None)


def make(inputs: DrafterInputs) -> SuffixDrafter:
    return SuffixDrafter()

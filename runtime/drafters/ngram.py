"""Drafts from a back-off n-gram table of the LLM's own text: no network, microseconds per tree.

Owns the lookup; flexspec/drafters/ngram.py owns the table. Lookups bisect memory-mapped arrays through memoryviews,
which is several times cheaper than numpy for one value; results are cached per context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import exp

import numpy as np
from numpy.typing import NDArray

from flexspec.drafters.ngram import PROB_STEP, SUCCESSORS, Arrays, check_table, extend_hash
from flexspec.runtime.drafters.base import DraftRequest
from flexspec.runtime.drafters.best_first import grow_best_first
from flexspec.runtime.drafters.make import DrafterInputs
from flexspec.tree import TokenTree

CACHED_CONTEXTS = 16_384  # about 12 MB when full
_PROBABILITY = tuple(exp(-PROB_STEP * code) for code in range(256))

Successors = tuple[tuple[int, float], ...]  # (token, probability), most likely first


class _Order:
    """The arrays of one n-gram order (context length) as memoryviews of Python numbers."""

    __slots__ = ("backoff", "keys", "probs", "starts", "tokens")

    def __init__(self, arrays: Arrays, n: int) -> None:
        self.keys, self.starts = arrays[f"keys.{n}"].data, arrays[f"starts.{n}"].data
        self.backoff, self.tokens = arrays[f"backoff.{n}"].data, arrays[f"tokens.{n}"].data
        self.probs = arrays[f"probs.{n}"].data


class NgramModel:
    """Interpolated next-token probabilities after a context of up to ``reach`` tokens."""

    def __init__(self, arrays: Arrays) -> None:
        check_table(arrays, "n-gram table")
        self.reach = int(arrays["meta"][1]) - 1
        self._orders = [_Order(arrays, n) for n in range(self.reach + 1)]
        self._cache: dict[tuple[int, ...], Successors] = {}

    def successors(self, context: tuple[int, ...]) -> Successors:
        """The most likely next tokens after ``context`` (oldest first, at most ``reach`` tokens)."""
        successors = self._cache.get(context)
        if successors is None:
            successors = self._look_up(context)
            if len(self._cache) >= CACHED_CONTEXTS:
                self._cache.clear()
            self._cache[context] = successors
        return successors

    def _look_up(self, context: tuple[int, ...]) -> Successors:
        order = self._orders[len(context)]
        state = 0
        for token in reversed(context):
            state = extend_hash(state, token)
        key = state >> 32
        at = bisect_left(order.keys, key)
        shorter = self.successors(context[1:]) if context else ()
        if at == len(order.keys) or order.keys[at] != key:
            return shorter
        start, stop = order.starts[at], order.starts[at + 1]
        probability = _PROBABILITY
        mass = probability[order.backoff[at]]
        merged = {token: mass * chance for token, chance in shorter}
        for token, code in zip(order.tokens[start:stop], order.probs[start:stop], strict=True):
            merged[token] = merged.get(token, 0.0) + probability[code]
        ranked = sorted([(-chance, token) for token, chance in merged.items()])[:SUCCESSORS]
        return tuple([(token, -negative) for negative, token in ranked])


def expand_ngrams(model: NgramModel, context: tuple[int, ...], root: int, max_nodes: int, max_depth: int) -> TokenTree:
    """The ``max_nodes`` most likely nodes after ``context``, whose last token is ``root``."""
    reach = model.reach

    def expand(context: tuple[int, ...], successor: tuple[int, float]) -> tuple[tuple[int, ...], Successors]:
        extended = (*context, successor[0])[-reach:]
        return extended, model.successors(extended)

    return grow_best_first("ngram", root, context, model.successors(context), expand, max_nodes, max_depth)


class NgramDrafter:
    """Best-first trees from one table shared by all requests; a request's state is its last few tokens."""

    name = "ngram"
    reads_features = False

    def __init__(self, model: NgramModel) -> None:
        self._model = model
        self._contexts: dict[int, tuple[int, ...]] = {}

    def begin(self, request_id: int, prompt_ids: Sequence[int]) -> None:
        self._contexts[request_id] = tuple(prompt_ids[-self._model.reach :])

    def observe_prompt(self, request_id: int, start: int, features_KE: NDArray[np.float32] | None) -> None:
        """Nothing to learn: this drafter reads tokens only."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [self._propose_one(request) for request in requests]

    def _propose_one(self, request: DraftRequest) -> TokenTree:
        context = self._contexts.get(request.request_id)
        if context is None:
            return TokenTree.root_only(request.last_token)
        return expand_ngrams(self._model, context, request.last_token, request.max_nodes, request.max_depth)

    def observe(self, request_id: int, committed: Sequence[int], features_KE: NDArray[np.float32] | None) -> None:
        context = self._contexts.get(request_id)
        if context is not None:
            self._contexts[request_id] = (*context, *committed)[-self._model.reach :]

    def end(self, request_id: int) -> None:
        self._contexts.pop(request_id, None)


def make(inputs: DrafterInputs) -> NgramDrafter:
    assert inputs.table is not None, "its record has a table"
    return NgramDrafter(NgramModel(inputs.table))

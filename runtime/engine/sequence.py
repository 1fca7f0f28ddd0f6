"""One request's sequence: its prompt, its committed tokens, and the state that turns tokens into text.

Owns the state and its derived numbers. Only commit.py appends to it; drafters and caches read it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Protocol

from flexspec.runtime.engine.api import RequestStats
from flexspec.runtime.engine.stop_strings import StopMatcher
from flexspec.sampling import SamplingParams


class Detokenizer(Protocol):
    """Tokens in, text out; keeps bytes of a character that is not complete yet."""

    def push(self, tokens: list[int]) -> str: ...

    def hidden(self, token: int) -> str:
        """The text of a special token, which ``push`` does not show; empty for all others."""
        ...

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        ...


class TokenSequence:
    """A running request. ``finish_reason`` stays None until it ends.

    ``context_limit``: most tokens, prompt and output together. ``seed``: the request's, or a fresh one that no other
    request has. ``stats`` of rounds and times are the engine's to fill through ``record_round`` and the two times.
    """

    def __init__(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        eos_ids: Collection[int],
        context_limit: int,
        detokenizer: Detokenizer,
    ) -> None:
        assert 0 < len(prompt_ids) < context_limit, "a prompt that leaves no room is refused at submit"
        self.request_id = request_id
        self.prompt_ids = tuple(prompt_ids)
        self.params = params
        self.eos_ids = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self.context_limit = context_limit
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.detokenizer = detokenizer
        self.stops = StopMatcher(params.stop)
        self.finish_reason: str | None = None
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self._output_ids: list[int] = []
        self._rounds = self._drafted = self._accepted = 0

    def __len__(self) -> int:
        """Tokens committed, prompt included; also the index of the next one (its noise position)."""
        return len(self.prompt_ids) + len(self._output_ids)

    @property
    def output_ids(self) -> Sequence[int]:
        """Tokens committed after the prompt, an end token included. Do not modify."""
        return self._output_ids

    @property
    def last_token(self) -> int:
        """The root of the next token tree."""
        return self._output_ids[-1] if self._output_ids else self.prompt_ids[-1]

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be committed; deeper drafts than this minus one are wasted."""
        return min(self.params.max_tokens - len(self._output_ids), self.context_limit - len(self))

    @property
    def stats(self) -> RequestStats:
        return RequestStats(
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=len(self._output_ids),
            rounds=self._rounds,
            drafted=self._drafted,
            accepted=self._accepted,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
        )

    def append_committed(self, token: int) -> None:
        """For commit.py only."""
        self._output_ids.append(token)

    def record_round(self, drafted: int, accepted: int) -> None:
        """Count one verify pass: tree nodes below the root, and how many of them were committed."""
        self._rounds += 1
        self._drafted += drafted
        self._accepted += accepted

    def abort(self, reason: str) -> None:
        """End without a commit: "cancelled" or "error"."""
        assert reason in ("cancelled", "error") and self.finish_reason is None
        self.finish_reason = reason

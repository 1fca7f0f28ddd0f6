"""What the engine promises its callers (server, CLI, benchmarks): requests in, text deltas out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flexspec.errors import RequestError
from flexspec.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0  # verify passes after prefill
    drafted: int = 0
    accepted: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens committed per round, without the first token, which comes from the prefill; 0 without a round."""
        return (self.completion_tokens - 1) / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Rate of decoding: tokens after the first over the time after it."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """What one commit added."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None  # "stop", "length", "cancelled", "error" (see ``error``)
    stats: RequestStats = field(default_factory=RequestStats)
    error: str | None = None


def check_prompt_ids(prompt_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError for a prompt without tokens, or with one that the model does not have."""
    if not prompt_ids:
        raise RequestError("a prompt of 0 tokens", "at least one token", "send some text", param="prompt")
    wrong = next((token for token in prompt_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"token id {wrong!r:.40} in the prompt", f"ids from 0 to {vocab_size - 1}", "use the model's own tokenizer",
            param="prompt",
        )  # fmt: skip


OnDelta = Callable[[Delta], None]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests in the engine now."""

    running: int = 0
    queued: int = 0
    failure: str | None = None  # why the engine cannot go on; None while it can


class EngineClient(Protocol):
    """The engine as the server sees it; all methods are thread-safe and return at once (never wait for a step).

    ``submit`` raises RequestError/CapacityError at once for prompts that can never fit, QueueFullError when there is no
    room now, EngineError after a failure. ``on_delta`` is called from the engine's thread, in order, the last call
    carrying a finish_reason and the request's final stats; it never blocks and never raises. Requests of one ``group``
    take turns with those of others when they wait.
    """

    def submit(self, prompt_ids: list[int], params: SamplingParams, on_delta: OnDelta, group: object = None) -> int: ...

    def cancel(self, request_id: int) -> None:
        """Stop a request and free its KV; unknown or finished ids are fine."""
        ...

    def last_step_age_s(self) -> float:
        """Seconds since the engine last finished a step (or since it was last idle)."""
        ...

    def load(self) -> EngineLoad:
        """Requests running and queued, and the failure if there was one."""
        ...

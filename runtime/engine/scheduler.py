"""Admission: the queue, the running requests, and the KV pages of each.

A request is admitted when the pool can hold all it may ever need (its prompt, its max_tokens and one worst-case tree),
so a running request is never preempted. Owns no policy of drafting or acceptance.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexspec.draft_plan import WorstCase
from flexspec.errors import CapacityError, QueueFullError
from flexspec.kv_slots import request_slots
from flexspec.runtime.engine.api import OnDelta, check_prompt_ids
from flexspec.runtime.engine.sequence import Detokenizer, TokenSequence
from flexspec.runtime.executors.pages import PageAllocator
from flexspec.sampling import SamplingParams
from flexspec.types import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How much an engine takes on."""

    context_tokens: int  # of one request, prompt and output together
    max_running: int = 16  # requests beyond it are queued
    max_waiting: int = 256
    longer_context: str = ""  # for messages: how to get a longer context; empty if the model has none


@dataclass(slots=True, eq=False)
class Running:
    """A request with its pages."""

    sequence: TokenSequence
    on_delta: OnDelta
    submitted_at: float
    group: object  # who asked: requests of one group take turns with those of others
    turn: int
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # committed tokens whose K/V are in the pool
    admitted_at: float = 0.0
    first_token_at: float | None = None

    @property
    def prefilled(self) -> bool:
        return self.cached >= len(self.sequence.prompt_ids)

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are still to be fed."""
        return max(0, len(self.sequence.prompt_ids) - self.cached)

    def slots(self, logical: NDArray[np.int32]) -> NDArray[np.int32]:
        """Pool slots of logical positions."""
        pages = np.asarray(self.pages, np.int32)
        return pages[logical // PAGE_TOKENS] * PAGE_TOKENS + logical % PAGE_TOKENS


class Scheduler:
    """First come, first served, but a group's requests take turns with those of others.

    Of many requests of a group that wait, each is a turn later than the one before it. Not thread-safe: the engine
    holds its lock around calls that do not say otherwise.
    """

    def __init__(
        self,
        pages: int,
        limits: EngineLimits,
        worst: WorstCase,
        new_detokenizer: Callable[[], Detokenizer],
        eos_ids: Sequence[int],
    ) -> None:
        self.limits, self.worst = limits, worst
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self._pool = PageAllocator(pages)
        self._pages = pages
        self._new_detokenizer = new_detokenizer
        self._eos_ids = tuple(eos_ids)
        self._cancelled: deque[int] = deque()
        self._next_id = 0
        self._turn = 0  # of the last request that was admitted

    @property
    def free_pages(self) -> int:
        return self._pool.free_pages

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def slots_needed(self, prompt_tokens: int, max_tokens: int) -> int:
        """Cache slots a request may ever use: its tokens up to the context limit, and one tree after them."""
        return request_slots(min(prompt_tokens + max_tokens, self.limits.context_tokens), self.worst.max_nodes)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_delta: OnDelta,
        vocab_size: int,
        group: object = None,
    ) -> int:
        """Queue a request; returns its id. Raises RequestError, CapacityError or QueueFullError.

        A request without a ``group`` is alone in one.
        """
        self.check(prompt_ids, params, vocab_size)
        if len(self.waiting) >= self.limits.max_waiting:
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting", f"fewer than {self.limits.max_waiting}", "try again later"
            )
        request_id, self._next_id = self._next_id, self._next_id + 1
        sequence = TokenSequence(
            request_id, prompt_ids, params, self._eos_ids, self.limits.context_tokens, self._new_detokenizer()
        )
        running = Running(sequence, on_delta, time.monotonic(), group, self._next_turn(group))
        bisect.insort(self.waiting, running, key=lambda other: other.turn)
        return request_id

    def _next_turn(self, group: object) -> int:
        own = (other.turn for other in self.waiting if group is not None and other.group is group)
        return max(self._turn, max(own, default=0)) + 1

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, vocab_size: int) -> None:
        """Raise RequestError or CapacityError for a request that can never run; needs no lock."""
        check_prompt_ids(prompt_ids, vocab_size)
        if len(prompt_ids) >= self.limits.context_tokens:
            raise CapacityError(
                f"a prompt of {len(prompt_ids)} tokens",
                f"fewer than {self.limits.context_tokens}, the longest prompt and output together",
                "shorten the prompt" + (f", or {self.limits.longer_context}" if self.limits.longer_context else ""),
            )
        slots = self.slots_needed(len(prompt_ids), params.max_tokens)
        if slots > self._pages * PAGE_TOKENS:
            raise CapacityError(
                f"a request that may need {slots} KV slots",
                f"at most the pool's {self._pages * PAGE_TOKENS}",
                "lower max_tokens, or serve with a larger --kv-tokens",
            )

    def cancel(self, request_id: int) -> None:
        """Needs no lock: one append to a deque."""
        self._cancelled.append(request_id)

    def take_cancelled(self) -> list[Running]:
        """Requests cancelled since the last call; they leave the queue now, the running list on release."""
        ids = {self._cancelled.popleft() for _ in range(len(self._cancelled))}
        if not ids:
            return []
        gone = [r for r in (*self.waiting, *self.running) if r.sequence.request_id in ids]
        self.waiting = deque(r for r in self.waiting if r.sequence.request_id not in ids)
        return gone

    def admit(self) -> list[Running]:
        """Admit waiting requests while there is room; the first that does not fit blocks those behind it."""
        entered: list[Running] = []
        while self.waiting and len(self.running) < self.limits.max_running:
            head = self.waiting[0]
            need = self.slots_needed(len(head.sequence.prompt_ids), head.sequence.params.max_tokens)
            if not self._pool.grow(head.pages, need):
                break
            self.waiting.popleft()
            head.admitted_at = time.monotonic()
            self._turn = max(self._turn, head.turn)
            self.running.append(head)
            entered.append(head)
        return entered

    def take_all(self) -> list[Running]:
        """All requests, waiting and running; the queue is empty afterwards."""
        everything = [*self.running, *self.waiting]
        self.waiting.clear()
        return everything

    def release(self, running: Running) -> None:
        """Free a request's pages; it leaves the running list."""
        self._pool.release(running.pages)
        if running in self.running:
            self.running.remove(running)

"""The round: draft, verify every tree in one LLM pass, accept, commit, gather KV. Prompt chunks share the same pass.

Owns the order of a round. scheduler.py admits requests, micro_batches.py groups them, round.py builds their rows, and
settlement.py accepts and commits what a step gave. Any thread may call any method; steps run one at a time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from flexspec.errors import EngineError, FlexspecError
from flexspec.runtime.drafters.budget import SpeculationSwitch
from flexspec.runtime.drafters.planned import PlannedDrafter
from flexspec.runtime.engine.api import Delta, EngineLoad, OnDelta
from flexspec.runtime.engine.micro_batches import MicroBatch, MicroBatches
from flexspec.runtime.engine.observer import Observer
from flexspec.runtime.engine.round import Clock, Round, draft_request, prompt_work, tree_work
from flexspec.runtime.engine.scheduler import EngineLimits, Running, Scheduler
from flexspec.runtime.engine.sequence import Detokenizer
from flexspec.runtime.engine.settlement import Settlement
from flexspec.runtime.executors.pages import pack_rows
from flexspec.runtime.executors.step import AtOnce, Executor, OverlappingExecutor
from flexspec.sampling import SamplingParams
from flexspec.tree import TokenTree

_PROMPT_SHARE = 4  # while prompts wait, drafts leave them one row of a step in so many


class Engine:
    """Continuous batching of speculative rounds over one LLM executor. Implements runtime/engine/api.py's EngineClient.

    ``micro_batches(requests)``: how many micro-batches share that many running requests; each has a round of its own,
    and while one is verified others are drafted or verified too, as far as the executor and the drafters overlap.
    """

    def __init__(
        self,
        executor: Executor,
        drafter: PlannedDrafter,
        new_detokenizer: Callable[[], Detokenizer],
        eos_ids: Sequence[int],
        limits: EngineLimits,
        observer: Observer | None = None,
        micro_batches: Callable[[int], int] = lambda requests: 1,
    ) -> None:
        self.executor, self.drafter = executor, drafter
        self._steps = executor if isinstance(executor, OverlappingExecutor) else AtOnce(executor)
        self._batches = MicroBatches(micro_batches)
        self._drafting: deque[MicroBatch] = deque()  # in the order in which their drafts began
        self._verifying: deque[MicroBatch] = deque()  # in the order of their steps
        self.speculation = SpeculationSwitch()
        self.clock = Clock()
        self.plain_step_s = 0.0  # measured seconds of a one-row step; 0 = unknown
        self._scheduler = Scheduler(executor.pages, limits, drafter.limits, new_detokenizer, eos_ids)
        self._observer = observer
        self._settlement = Settlement(executor, drafter, self.clock, observer, self._finish)
        self.wanted = threading.Event()  # set by submit and cancel: the thread that steps the engine may wait on it
        self._lock = threading.Lock()
        self._stepping = threading.RLock()
        self._last_step = time.monotonic()
        self._failure: str | None = None
        self._ended: str | None = None  # why requests are no longer accepted
        self._report_load()

    # -- any thread ------------------------------------------------------------------------------------------------

    def submit(self, prompt_ids: list[int], params: SamplingParams, on_delta: OnDelta, group: object = None) -> int:
        """Queue a request. Raises RequestError, CapacityError, QueueFullError, or EngineError after its end."""
        with self._lock:  # the end is marked under it too: no request can slip in and wait for ever
            if self._ended is not None:
                raise EngineError(
                    f"the engine has ended: {self._ended}", "a running engine",
                    "start the server again (serve --restart does it by itself)",
                )  # fmt: skip
            if self._scheduler.idle:
                self._last_step = time.monotonic()  # it was idle until now, not stuck
            request_id = self._scheduler.submit(prompt_ids, params, on_delta, self.executor.vocab_size, group)
        self.wanted.set()
        return request_id

    def check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Raise what ``submit`` raises for a prompt that can never run: RequestError, CapacityError."""
        self._scheduler.check(prompt_ids, params, self.executor.vocab_size)

    def cancel(self, request_id: int) -> None:
        """Takes no lock: a finalizer may call it at any point of the thread."""
        self._scheduler.cancel(request_id)
        if not self.wanted.is_set():
            self.wanted.set()

    def last_step_age_s(self) -> float:
        return 0.0 if self._scheduler.idle else time.monotonic() - self._last_step

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._scheduler.running), len(self._scheduler.waiting), self._failure)

    @property
    def free_pages(self) -> int:
        return self._scheduler.free_pages

    # -- one thread at a time --------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Begin the rounds that can begin, and end the oldest in flight; False when there was nothing to do.

        Requests get an error, not silence, when it fails.
        """
        with self._stepping:
            return self._step()

    def _step(self) -> bool:
        began = time.perf_counter()
        with self._lock:
            gone = self._scheduler.take_cancelled()
            entered = self._scheduler.admit()
        for running in gone:
            self._finish(running, "cancelled")
        for running in entered:
            self._batches.add(running)
        busy = bool(self._scheduler.running or self._drafting or self._verifying)
        if busy:
            try:
                for running in entered:
                    self.drafter.begin(running.sequence.request_id, running.sequence.prompt_ids)
                self._run()
            except FlexspecError as error:
                self.fail(str(error), error.found)
            self.clock.total_s += time.perf_counter() - began
        self._last_step = time.monotonic()
        self._report_load()
        return busy or bool(gone)

    def fail(self, reason: str, found: str = "") -> None:
        """End everything in flight with an error; later submits are refused. ``found``: the reason in a few words."""
        self._failure = reason
        self._end_all(reason, "error", found)

    def stop(self) -> None:
        """End everything in flight as cancelled, for an orderly shutdown; later submits are refused."""
        self._end_all("it was stopped", "cancelled")

    def _end_all(self, why: str, reason: str, found: str = "") -> None:
        with self._stepping:
            for flow in (self._drafting, self._verifying, self._batches):
                flow.clear()
            with self._lock:
                self._ended = self._ended or found or why
                everything = self._scheduler.take_all()
            for running in everything:
                self._finish(running, reason, why if reason == "error" else None)

    def _run(self) -> None:
        """Each micro-batch is between rounds, drafting or verifying, and goes through these in turn; a round is spread
        over several calls where drafts or steps run elsewhere (docs/design/engine.md has the time line)."""
        for batch in self._batches.idle():
            self._start_draft(batch)
        while self._drafting:
            self._start_step(self._drafting.popleft())
            if self._verifying and not self._steps.returns_early:
                break  # its result is ready: the next draft of its requests begins before another step does
        if self._verifying:
            self._finish_round(self._verifying.popleft())

    def _start_draft(self, batch: MicroBatch) -> None:
        """A round's beginning: start its draft, if there is one."""
        began = time.perf_counter()
        decoding = [r for r in batch.members if r.prefilled]
        prompts = [r for r in batch.members if not r.prefilled]
        draft = None
        if decoding and self.speculation.enabled and self.drafter.drafts:
            most = self._most_nodes(decoding, prompts)
            draft_requests = [draft_request(running, self.drafter.limits, most) for running in decoding]
            draft = self.drafter.start(draft_requests, len(self._scheduler.running))
        batch.round = Round(decoding, prompts, draft, began)
        batch.round.draft_s = time.perf_counter() - began
        self._drafting.append(batch)

    def _most_nodes(self, decoding: Sequence[Running], prompts: Sequence[Running]) -> int:
        """Drafted nodes that each request may have in the step, after the share of waiting prompts."""
        waiting = sum(r.prompt_left for r in prompts)
        rows = self.executor.max_rows - min(waiting, self.executor.max_rows // _PROMPT_SHARE)
        return max(0, rows // len(decoding) - 1)

    def _start_step(self, batch: MicroBatch) -> None:
        """A round's middle: the draft's end, and the step's beginning."""
        this = batch.round
        assert this is not None
        began = time.perf_counter()
        if this.draft is not None:
            trees = self.drafter.finish(this.draft)
        else:
            trees = [TokenTree.root_only(r.sequence.last_token) for r in this.decoding]
        drafted = time.perf_counter()
        self._note_draft(this, drafted - began)
        this.work = [
            tree_work(r, tree) for r, tree in zip(this.decoding, trees, strict=True) if r.sequence.finish_reason is None
        ]
        rows_left = self.executor.max_rows - sum(len(w.rows.ids) for w in this.work)
        this.work += prompt_work([r for r in this.prompts if r.sequence.finish_reason is None], rows_left)
        if not this.work:  # all were cancelled meanwhile
            batch.round = None
            return
        sampled = any(not w.running.sequence.params.greedy for w in this.work if w.rows.logit_rows)
        packed = pack_rows([w.rows for w in this.work])
        started = time.perf_counter()
        self._steps.start(packed, want_logits=sampled, want_features=self.drafter.reads_features)
        this.step_s = time.perf_counter() - started
        self._verifying.append(batch)

    def _note_draft(self, this: Round, seconds: float) -> None:
        if this.draft is None:
            return
        seconds += this.draft_s
        self.clock.draft_s += seconds
        if self.plain_step_s:
            self.drafter.record_cost(seconds / self.plain_step_s)
        if self._observer:
            self._observer.record_step(seconds, "draft")

    def _finish_round(self, batch: MicroBatch) -> None:
        """A round's end: the results of its step, accepted and committed."""
        this = batch.round
        assert this is not None
        began = time.perf_counter()
        result = self._steps.finish()
        step_s = this.step_s + time.perf_counter() - began
        batch.round = None
        self.clock.step_s += step_s
        if self._observer:
            self._observer.record_step(step_s, "verify" if this.decoding else "prefill")
        committed = self._settlement.settle(this.work, result)
        requests = len(this.decoding)
        if requests and requests == len(this.work):  # a pure decoding step: comparable with others of its size
            seconds = time.perf_counter() - this.began
            if this.draft is not None and this.draft.plan.method != "off":
                self.speculation.record_round(requests, committed, seconds)
            elif self.drafter.drafts:
                self.speculation.record_plain(requests, seconds)

    def _finish(
        self, running: Running, reason: str, error: str | None = None, *, text: str = "", tokens: tuple[int, ...] = ()
    ) -> None:
        sequence = running.sequence
        if sequence.finish_reason is None:
            sequence.abort(reason)
        self.drafter.end(sequence.request_id)
        self._batches.remove(running)
        with self._lock:
            self._scheduler.release(running)
        if self._observer:
            first = None if running.first_token_at is None else running.first_token_at - running.submitted_at
            self._observer.record_finished(reason, sequence.stats, first)
        running.on_delta(Delta(text, tokens, reason, sequence.stats, error))

    def _report_load(self) -> None:
        if self._observer:
            self._observer.set_pages(self._scheduler.free_pages, self.executor.pages)
            self._observer.set_load(len(self._scheduler.running), len(self._scheduler.waiting))

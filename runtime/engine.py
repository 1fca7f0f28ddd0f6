"""The round: draft, verify every tree in one LLM pass, accept, commit, gather KV. Prompt chunks share the same pass.

Owns the requests in flight and the order of a step; who may enter is runtime/scheduler's, which path is taken
runtime/accept's, and appending to a sequence runtime/commit's. One thread calls :meth:`Engine.step`; ``submit`` and
``cancel`` may come from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import EngineError, FlexspecError
from flexspec.runtime.accept import Accepted, accept_greedy, accept_sampled
from flexspec.runtime.api import Delta, EngineLoad, OnDelta
from flexspec.runtime.commit import Committed, commit
from flexspec.runtime.drafters.base import DraftRequest
from flexspec.runtime.drafters.budget import SpeculationWatch
from flexspec.runtime.drafters.planned import PlannedDrafter
from flexspec.runtime.observer import Observer, report_round
from flexspec.runtime.pages import RowGroup, pack_rows
from flexspec.runtime.scheduler import Limits, Running, Scheduler
from flexspec.runtime.sequence import Detokenizer
from flexspec.runtime.step import Executor, StepResult
from flexspec.sampling import SamplingParams
from flexspec.tree import TokenTree

_PROMPT_SHARE = 4  # while prompts wait, drafts leave them this part of a step's rows


@dataclass(slots=True)
class Clock:
    """Where the time of all rounds so far went, in seconds: LLM steps, drafting, moving KV, and the rest, in Python."""

    step_s: float = 0.0
    draft_s: float = 0.0
    gather_s: float = 0.0
    total_s: float = 0.0

    @property
    def overhead_s(self) -> float:
        return self.total_s - self.step_s - self.draft_s - self.gather_s


@dataclass(slots=True)
class _Work:
    """One request's part of a step: a token tree to verify, or a piece of its prompt (``tree`` None)."""

    running: Running
    tree: TokenTree | None
    rows: RowGroup


class Engine:
    """Continuous batching of speculative rounds over one LLM executor. Implements runtime/api.py's EngineClient."""

    def __init__(
        self,
        executor: Executor,
        drafter: PlannedDrafter,
        new_detokenizer: Callable[[], Detokenizer],
        eos_ids: Sequence[int],
        limits: Limits,
        observer: Observer | None = None,
    ) -> None:
        self.executor, self.drafter = executor, drafter
        self.watch = SpeculationWatch()
        self.clock = Clock()
        self.plain_step_s = 0.0  # measured seconds of a one-row step; 0 = unknown
        self._scheduler = Scheduler(executor.pages, limits, drafter.limits, new_detokenizer, eos_ids)
        self._observer = observer
        self.wanted = threading.Event()  # set by submit and cancel: whoever steps the engine may sleep on it
        self._lock = threading.Lock()
        self._last_step = time.monotonic()
        self._failure: str | None = None
        self._ended: str | None = None  # why nothing is taken any more
        self._report_load()

    # -- any thread ------------------------------------------------------------------------------------------------

    def submit(self, prompt_ids: list[int], params: SamplingParams, on_delta: OnDelta) -> int:
        """Queue a request. Raises RequestError, CapacityError, QueueFullError, or EngineError after its end."""
        with self._lock:  # the end is marked under it too: nobody can slip in and wait for ever
            if self._ended is not None:
                raise EngineError(f"the engine has ended: {self._ended}", "a running engine", "restart the server")
            if self._scheduler.idle:
                self._last_step = time.monotonic()  # it was idle until now, not stuck
            request_id = self._scheduler.submit(prompt_ids, params, on_delta, self.executor.vocab_size)
        self.wanted.set()
        return request_id

    def cancel(self, request_id: int) -> None:
        with self._lock:
            self._scheduler.cancel(request_id)
        self.wanted.set()

    def last_step_age_s(self) -> float:
        return 0.0 if self._scheduler.idle else time.monotonic() - self._last_step

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._scheduler.running), len(self._scheduler.waiting), self._failure)

    @property
    def free_pages(self) -> int:
        return self._scheduler.free_pages

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step; False when there was nothing to do. Requests get an error, not silence, when it fails."""
        began = time.perf_counter()
        with self._lock:
            gone = self._scheduler.take_cancelled()
            entered = self._scheduler.admit()
        for running in gone:
            self._finish(running, "cancelled")
        busy = bool(self._scheduler.running)
        if busy:
            try:
                for running in entered:
                    self.drafter.begin(running.sequence.request_id, running.sequence.prompt_ids)
                self._run(began)
            except FlexspecError as error:
                self.fail(str(error))
            self.clock.total_s += time.perf_counter() - began
        self._last_step = time.monotonic()
        self._report_load()
        return busy or bool(gone)

    def fail(self, reason: str) -> None:
        """End everything in flight with an error; later submits are refused."""
        self._failure = reason
        self._end_all(reason, "error")

    def stop(self) -> None:
        """End everything in flight as cancelled, for an orderly shutdown; later submits are refused."""
        self._end_all("it was stopped", "cancelled")

    def _end_all(self, why: str, reason: str) -> None:
        with self._lock:
            self._ended = self._ended or why
            everything = self._scheduler.take_all()
        for running in everything:
            self._finish(running, reason, why if reason == "error" else None)

    def _run(self, began: float) -> None:
        decoding = [r for r in self._scheduler.running if r.prefilled]
        speculate = self.watch.enabled and self.drafter.plan.method != "off"
        trees = self._draft(decoding, speculate)
        work = [self._tree_work(r, tree) for r, tree in zip(decoding, trees, strict=True)]
        work += self._prompt_work(self.executor.max_rows - sum(len(tree) for tree in trees))
        sampled = any(not w.running.sequence.params.greedy for w in work if w.rows.logit_rows)
        batch = pack_rows([w.rows for w in work])
        started = time.perf_counter()
        result = self.executor.step(batch, want_logits=sampled, want_features=self.drafter.reads_features)
        step_s = time.perf_counter() - started
        self.clock.step_s += step_s
        if self._observer:
            self._observer.record_step(step_s, "verify" if decoding else "prefill")
        committed = self._settle(work, result)
        if decoding and len(decoding) == len(work):  # a pure decoding step: comparable with others of its size
            seconds = time.perf_counter() - began
            if speculate:
                self.watch.record_round(len(decoding), committed, seconds)
            elif self.drafter.plan.method != "off":
                self.watch.record_plain(len(decoding), seconds)

    def _draft(self, decoding: Sequence[Running], speculate: bool) -> list[TokenTree]:
        if not speculate or not decoding:
            return [TokenTree.root_only(r.sequence.last_token) for r in decoding]
        began = time.perf_counter()
        waiting = sum(r.prompt_left for r in self._scheduler.running)
        rows = self.executor.max_rows - min(waiting, self.executor.max_rows // _PROMPT_SHARE)
        most = max(0, rows // len(decoding) - 1)
        wishes = [
            DraftRequest(
                r.sequence.request_id,
                r.sequence.last_token,
                min(most, self.drafter.limits.max_nodes),
                min(r.sequence.tokens_left - 1, self.drafter.limits.max_depth),
                r.sequence.params,
            )
            for r in decoding
        ]
        trees = self.drafter.propose(wishes)
        seconds = time.perf_counter() - began
        self.clock.draft_s += seconds
        if self.plain_step_s:
            self.drafter.draft_cost += 0.1 * (seconds / self.plain_step_s - self.drafter.draft_cost)
        if self._observer:
            self._observer.record_step(seconds, "draft")
        return trees

    def _tree_work(self, running: Running, tree: TokenTree) -> _Work:
        bits = [1]
        depth = [0]
        for i in range(1, len(tree)):
            bits.append(bits[tree.parents[i]] | 1 << i)
            depth.append(depth[tree.parents[i]] + 1)
        context = running.cached
        return _Work(
            running,
            tree,
            RowGroup(
                tree.tokens,
                [context + d for d in depth],
                context,
                running.pages,
                range(len(tree)),
                bits if len(tree) > 1 else None,
            ),
        )

    def _prompt_work(self, rows_left: int) -> list[_Work]:
        """The next piece of each prompt, in order of arrival, as far as the step has room."""
        work = []
        for running in self._scheduler.running:
            if running.prefilled or rows_left <= 0:
                continue
            start, prompt = running.cached, running.sequence.prompt_ids
            piece = prompt[start : start + rows_left]
            last = start + len(piece) == len(prompt)
            positions = range(start, start + len(piece))
            rows = RowGroup(piece, positions, start, running.pages, [len(piece) - 1] if last else [])
            work.append(_Work(running, None, rows))
            rows_left -= len(piece)
        return work

    def _settle(self, work: Sequence[_Work], result: StepResult) -> int:
        """Accept, commit and gather for every request of the step; returns the tokens decoding requests committed."""
        row = logit = committed = 0
        for w in work:
            features = None if result.features_TE is None else result.features_TE[row : row + len(w.rows.ids)]
            logits = slice(logit, logit + len(w.rows.logit_rows))
            row, logit = row + len(w.rows.ids), logits.stop
            if w.tree is None:
                self._settle_prompt(w, result, logits, features)
            else:
                committed += self._settle_tree(w, w.tree, result, logits, features)
        return committed

    def _settle_prompt(self, w: _Work, result: StepResult, logits: slice, features: NDArray[np.float32] | None) -> None:
        running, sequence = w.running, w.running.sequence
        if features is not None:
            self.drafter.observe_prompt(sequence.request_id, running.cached, features)
        running.cached += len(w.rows.ids)
        if not w.rows.logit_rows:
            return
        token = self._accept(running, TokenTree.root_only(sequence.last_token), result, logits).next_token
        now = time.monotonic()
        sequence.prefill_s, running.first_token_at = now - running.admitted_at, now
        self._deliver(running, [token], commit(sequence, [token]), None if features is None else features[-1:])

    def _settle_tree(
        self, w: _Work, tree: TokenTree, result: StepResult, logits: slice, features: NDArray[np.float32] | None
    ) -> int:
        running, sequence = w.running, w.running.sequence
        accepted = self._accept(running, tree, result, logits)
        path = np.array(accepted.nodes, np.int32)
        self._gather(running, path)
        if len(tree) > 1:
            self.drafter.record(tree, accepted.nodes)
        tokens = accepted.tokens(tree)
        done = commit(sequence, tokens)
        taken = accepted.nodes[1 : done.kept + 1]  # an end inside the path drops what lies behind it
        sequence.record_round(len(tree) - 1, len(taken))
        if self._observer:
            report_round(self._observer, tree, taken, done.kept)
        self._deliver(running, tokens, done, None if features is None else features[path])
        return done.kept

    def _accept(self, running: Running, tree: TokenTree, result: StepResult, rows: slice) -> Accepted:
        sequence = running.sequence
        if sequence.params.greedy:
            return accept_greedy(tree, result.argmax_L[rows])
        assert result.logits_LV is not None
        return accept_sampled(tree, result.logits_LV[rows], sequence.params, sequence.seed, len(sequence))

    def _gather(self, running: Running, path: NDArray[np.int32]) -> None:
        """Bring the accepted nodes' K/V to the slots of their positions; what was rejected is simply left behind."""
        source, target = running.cached + path, running.cached + np.arange(len(path), dtype=np.int32)
        moved = source != target
        if moved.any():
            began = time.perf_counter()
            self.executor.move_kv(running.slots(source[moved]), running.slots(target[moved]))
            self.clock.gather_s += time.perf_counter() - began
        running.cached += len(path)

    def _deliver(
        self, running: Running, tokens: Sequence[int], done: Committed, features: NDArray[np.float32] | None
    ) -> None:
        """Tell the drafters and the caller what was committed; end the request if that ended it."""
        sequence, kept = running.sequence, tuple(tokens[: done.kept])
        if running.first_token_at is not None:
            sequence.decode_s = time.monotonic() - running.first_token_at
        if done.finish_reason is not None:
            self._finish(running, done.finish_reason, text=done.text, tokens=kept)
            return
        self.drafter.observe(sequence.request_id, tokens, features)
        running.on_delta(Delta(done.text, kept))

    def _finish(
        self, running: Running, reason: str, error: str | None = None, *, text: str = "", tokens: tuple[int, ...] = ()
    ) -> None:
        sequence = running.sequence
        if sequence.finish_reason is None:
            sequence.abort(reason)
        self.drafter.end(sequence.request_id)
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

"""What follows a step: each request's path is accepted and committed, its K/V moved, and its caller told.

Owns that order for one request; which path is taken is runtime/acceptance's, appending to a sequence runtime/commit's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import EngineError
from flexspec.runtime.acceptance.accept import Accepted, accept_greedy, accept_sampled
from flexspec.runtime.drafters.planned import PlannedDrafter
from flexspec.runtime.engine.api import Delta
from flexspec.runtime.engine.commit import Committed, commit
from flexspec.runtime.engine.observer import Observer, report_round
from flexspec.runtime.engine.round import Clock, Work
from flexspec.runtime.engine.scheduler import Running
from flexspec.runtime.executors.step import Executor, StepResult
from flexspec.tree import TokenTree

_NOT_FINITE = EngineError(
    "logits that are not finite", "finite numbers", "check the model's weights; bf16 may overflow where f32 does not"
)


class Finish(Protocol):
    """Ends a request: frees what it holds and tells its caller the last text and tokens."""

    def __call__(
        self, running: Running, reason: str, error: str | None = None, *, text: str, tokens: tuple[int, ...]
    ) -> None: ...


class Settlement:
    """Settles the steps of one engine; ``finish`` ends a request whose tokens or whose broken row ended it."""

    def __init__(
        self, executor: Executor, drafter: PlannedDrafter, clock: Clock, observer: Observer | None, finish: Finish
    ) -> None:
        self._executor, self._drafter, self._clock = executor, drafter, clock
        self._observer, self._finish = observer, finish

    def settle(self, work: Sequence[Work], result: StepResult) -> int:
        """Accept, commit and gather for every request of the step; returns the tokens decoding requests committed."""
        row = logit = committed = 0
        for w in work:
            features = None if result.features_TE is None else result.features_TE[row : row + len(w.rows.ids)]
            logits = slice(logit, logit + len(w.rows.logit_rows))
            row, logit = row + len(w.rows.ids), logits.stop
            if w.running.sequence.finish_reason is not None:  # cancelled while the step ran
                continue
            if w.tree is None:
                self._settle_prompt(w, result, logits, features)
            else:
                committed += self._settle_tree(w, w.tree, result, logits, features)
        return committed

    def _settle_prompt(self, w: Work, result: StepResult, logits: slice, features: NDArray[np.float32] | None) -> None:
        running, sequence = w.running, w.running.sequence
        if features is not None:
            self._drafter.observe_prompt(sequence.request_id, running.cached, features)
        running.cached += len(w.rows.ids)
        if not w.rows.logit_rows:
            return
        root = TokenTree.root_only(sequence.last_token)
        accepted = self._accept(running, root, result, logits)
        now = time.monotonic()
        sequence.prefill_s, running.first_token_at = now - running.admitted_at, now
        done = commit(sequence, accepted.tokens(root))
        self._deliver(running, root, accepted, done, None if features is None else features[-1:])

    def _settle_tree(
        self, w: Work, tree: TokenTree, result: StepResult, logits: slice, features: NDArray[np.float32] | None
    ) -> int:
        running, sequence = w.running, w.running.sequence
        accepted = self._accept(running, tree, result, logits)
        path = np.array(accepted.nodes, np.int32)
        self._gather(running, path)
        if len(tree) > 1:
            self._drafter.record(tree, accepted.nodes)
        done = commit(sequence, accepted.tokens(tree))
        taken = accepted.nodes[1 : done.count + 1]  # an end inside the path drops the nodes after it
        sequence.record_round(len(tree) - 1, len(taken))
        if self._observer:
            report_round(self._observer, tree, taken, done.count)
        self._deliver(running, tree, accepted, done, None if features is None else features[path])
        return done.count

    def _accept(self, running: Running, tree: TokenTree, result: StepResult, rows: slice) -> Accepted:
        """What the request may commit: nothing, if a row that decides it is not finite. Others go on without it."""
        sequence = running.sequence
        if sequence.params.greedy:
            return accept_greedy(tree, result.argmax_L[rows])
        assert result.logits_LV is not None
        try:
            return accept_sampled(tree, result.logits_LV[rows], sequence.params, sequence.seed, len(sequence))
        except EngineError:
            return Accepted((0,), None)

    def _gather(self, running: Running, path: NDArray[np.int32]) -> None:
        """Move the accepted nodes' K/V to the slots of their positions; rejected rows are simply overwritten later."""
        source, target = running.cached + path, running.cached + np.arange(len(path), dtype=np.int32)
        moved = source != target
        if moved.any():
            began = time.perf_counter()
            self._executor.move_kv(running.slots(source[moved]), running.slots(target[moved]))
            self._clock.gather_s += time.perf_counter() - began
        running.cached += len(path)

    def _deliver(
        self,
        running: Running,
        tree: TokenTree,
        accepted: Accepted,
        done: Committed,
        features: NDArray[np.float32] | None,
    ) -> None:
        """Tell the drafters and the caller what was committed; end the request if that, or a broken row, ended it."""
        sequence, tokens = running.sequence, accepted.tokens(tree)
        committed = tuple(tokens[: done.count])
        if running.first_token_at is not None:
            sequence.decode_s = time.monotonic() - running.first_token_at
        if done.finish_reason is not None:
            self._finish(running, done.finish_reason, text=done.text, tokens=committed)
            return
        if not accepted.sound:
            self._finish(running, "error", str(_NOT_FINITE), text=done.text, tokens=committed)
            return
        self._drafter.observe(sequence.request_id, tokens, features)
        running.on_delta(Delta(done.text, committed))

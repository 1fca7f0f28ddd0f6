"""Drafts by a small speculative model over its own executor and KV pool.

Owns each request's context in the SSM: what is cached, what is still to be fed, its pages. Two kinds of SSM: a plain
decoder over the LLM's vocabulary, and a fused-state one that also reads the LLM's hidden features (EAGLE-3, arXiv
2503.01840) and drafts over a reduced vocabulary. Drafted rows never survive a round: committed tokens are fed again,
with true features, into the slots that the drafts used.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from flexspec.draft_plan import DraftPlan, Expansion
from flexspec.errors import CapacityError
from flexspec.runtime.acceptance.noise import DraftNoise, draft_child
from flexspec.runtime.acceptance.transforms import target_law
from flexspec.runtime.drafters.base import DraftRequest
from flexspec.runtime.drafters.expand import Growth
from flexspec.runtime.drafters.make import DrafterInputs
from flexspec.runtime.drafters.ssm_context import Context, DraftJob
from flexspec.runtime.drafters.worth import StepWorth
from flexspec.runtime.executors.pages import PageAllocator, RowGroup, pack_rows
from flexspec.runtime.executors.step import Executor
from flexspec.tree import TokenTree

_USUAL_PENDING = 16  # most tokens per request that a usual round's first step feeds


class SsmDrafter:
    """Trees of one SSM for all requests at once: one catch-up step, then one step for each further level.

    ``keep_ids[i]`` is the token of output row i (None: the SSM has the LLM's ``vocab_size``). ``sampled`` "mixed" draws
    the last child of each node for sampled requests and keeps its law; else children are deterministic. Requests beyond
    the SSM's positions or its pool get root-only trees. Raises CapacityError for an expansion the executor cannot run.
    """

    def __init__(
        self,
        executor: Executor,
        expansion: Expansion,
        vocab_size: int,
        *,
        keep_ids: NDArray[np.integer] | None = None,
        reads_features: bool = False,
        sampled: str = "deterministic",
        name: str = "ssm",
    ) -> None:
        outputs = vocab_size if keep_ids is None else len(keep_ids)
        if outputs != executor.vocab_size:
            raise CapacityError(
                f"an SSM with {executor.vocab_size} outputs", f"{outputs} outputs, one for each token it may draft",
                "use the SSM made for this LLM (same tokenizer, its own keep_ids)",
            )  # fmt: skip
        self.name = name
        self.reads_features = reads_features
        self.counts: Counter[str] = Counter()  # steps, rows, and requests skipped by reason
        self._executor = executor
        self._vocab_size = vocab_size
        self._keep_ids = np.arange(vocab_size) if keep_ids is None else np.asarray(keep_ids, np.int64)
        self._plan: DraftPlan | None = None
        self._shape(expansion, sampled)
        self._pool = PageAllocator(executor.pages)
        self._contexts: dict[int, Context] = {}
        self.worth: StepWorth | None = None  # None: every level of the expansion runs

    @property
    def free_pages(self) -> int:
        return self._pool.free_pages

    def use(self, plan: DraftPlan) -> None:
        """Raises CapacityError for trees with more rows than a step of the SSM."""
        if plan is not self._plan:
            self._shape(plan.expansion, plan.sampled)
            self._plan = plan

    def _shape(self, expansion: Expansion, sampled: str) -> None:
        if expansion.draft_rows > self._executor.max_rows:
            raise CapacityError(
                f"an expansion with {expansion.draft_rows} draft rows",
                f"at most {self._executor.max_rows} rows a step", "choose a smaller tree",
            )  # fmt: skip
        self._expansion, self._mixed = expansion, sampled == "mixed"

    def begin(self, request_id: int, prompt_ids: Sequence[int]) -> None:
        self.end(request_id)
        context = self._contexts[request_id] = Context()
        if self.reads_features:
            context.prompt = list(prompt_ids)
        else:
            context.append(prompt_ids)

    def observe_prompt(self, request_id: int, start: int, features_KE: NDArray[np.float32] | None) -> None:
        """Pair each feature with the token after it. Rows never seen (a prefix-cache hit) stay out of the context."""
        context = self._contexts.get(request_id)
        if context is None or features_KE is None or not self.reads_features:
            return
        tokens = context.prompt[start + 1 : start + 1 + len(features_KE)]
        if tokens and context.next_position != start + 1:
            context.restart(start + 1)
        self._append(context, tokens, features_KE)

    def observe(self, request_id: int, committed: Sequence[int], features_KE: NDArray[np.float32] | None) -> None:
        context = self._contexts.get(request_id)
        if context is None or not committed:
            return
        if self.reads_features and context.prompt:
            if context.next_position != len(context.prompt):
                context.restart(len(context.prompt))
            context.prompt = []
        if self.reads_features and features_KE is None:  # a gap: start again after it
            context.restart(context.next_position + len(committed))
            return
        self._append(context, committed, features_KE)

    def _append(self, context: Context, tokens: Sequence[int], features_KE: NDArray[np.float32] | None) -> None:
        if self.reads_features and features_KE is not None:
            features = np.array(features_KE[: len(tokens)], np.float32)  # copied: the step reuses its buffer
            context.append(tokens, features)
        else:
            context.append(tokens)

    def end(self, request_id: int) -> None:
        context = self._contexts.pop(request_id, None)
        if context is not None:
            self._pool.release(context.pages)

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        trees = [TokenTree.root_only(request.last_token) for request in requests]
        jobs = [job for i, request in enumerate(requests) if (job := self._prepare(i, request)) is not None]
        usual = sum(len(job.context.pending) for job in jobs) <= _USUAL_PENDING * len(jobs)
        with self._timed(0, usual and bool(jobs)):
            self._catch_up(jobs)
        for level in range(1, max((len(job.expansion.children) for job in jobs), default=0)):
            chosen = self._worth_extending([job for job in jobs if level < len(job.expansion.children)], level)
            if not chosen:
                break
            with self._timed(level, True):
                self._extend(chosen, level)
        for job in jobs:
            trees[job.place] = job.growth.tree(job.request.max_nodes, job.request.max_depth)
        return trees

    @contextmanager
    def _timed(self, level: int, usual: bool) -> Iterator[None]:
        """Record the time of a level's step, except of a first one that feeds a whole prompt."""
        began = time.perf_counter()
        yield
        if self.worth is not None and usual:
            self.worth.ran(level, time.perf_counter() - began)

    def _worth_extending(self, jobs: list[DraftJob], level: int) -> list[DraftJob]:
        """The jobs to extend. Trees with drawn nodes always are: their size must not depend on the draws."""
        if self.worth is None:
            return jobs
        reached = sum(job.growth.reached(job.expansion.beam) for job in jobs if job.noise is None)
        return jobs if self.worth.ask(level, reached) else [job for job in jobs if job.noise is not None]

    def _prepare(self, place: int, request: DraftRequest) -> DraftJob | None:
        """The request's job with pages for its worst case, or None when it cannot be drafted for now."""
        context = self._contexts.get(request.request_id)
        if context is None or context.given_up or request.max_nodes < 1 or request.max_depth < 1:
            return None
        if not context.feed_root_again():  # proposed before without a commit
            return None
        room = self._executor.max_positions - context.next_position
        if room < 0:  # the SSM's context is full for good
            self._give_up(context)
            return None
        drawn = self._mixed and not request.params.greedy
        expansion = self._expansion
        depth = min(request.max_depth, room + 1, len(expansion.children))
        expansion = Expansion(expansion.children[:depth], expansion.beam)
        if drawn:
            expansion = expansion.fitting(request.max_nodes, depth)
        if not expansion.children:
            return None
        if not self._pool.grow(context.pages, context.cached + len(context.pending) + expansion.draft_rows):
            self.counts["skipped_pool_full"] += 1
            return None
        noise = DraftNoise(request.seed, context.next_position) if drawn else None
        return DraftJob(place, request, context, Growth(request.last_token, self.name), expansion, noise)

    def _give_up(self, context: Context) -> None:
        self.counts["skipped_out_of_positions"] += 1
        context.given_up = True
        context.restart(0)
        self._pool.release(context.pages)

    def _catch_up(self, jobs: Sequence[DraftJob]) -> None:
        """Feed all pending tokens in steps of at most max_rows; the last row of each request gives its first level."""
        waiting = list(jobs)
        while waiting:
            left = self._executor.max_rows
            groups: list[RowGroup] = []
            done: list[tuple[DraftJob, int]] = []  # finished jobs and their last row in this step
            rows = 0
            for job in waiting:
                take = min(len(job.context.pending), left)
                if not take:
                    break
                final = take == len(job.context.pending)
                groups.append(self._pending_rows(job.context, take, final))
                rows, left = rows + take, left - take
                if final:
                    done.append((job, rows - 1))
            logits_LV, features_TE = self._run(groups)
            for job, row in done:
                if features_TE is not None:
                    job.growth.features[0] = features_TE[row].copy()
            if done:
                self._add_children([(job, 0) for job, _ in done], logits_LV, 0)
            waiting = [job for job in waiting if job.context.pending]

    def _pending_rows(self, context: Context, take: int, final: bool) -> RowGroup:
        """Move ``take`` pending tokens into the cache."""
        first, slots = context.next_to_feed, context.cached
        tokens, features = context.feed(take)
        return RowGroup(
            tokens, range(first, first + take), slots, context.pages, [take - 1] if final else [],
            features=features if self.reads_features else None,
        )  # fmt: skip

    def _extend(self, jobs: Sequence[DraftJob], level: int) -> None:
        """Feed the chosen nodes of the newest level of every job, and add their children."""
        left = self._executor.max_rows
        batch: list[tuple[DraftJob, list[int], list[int]]] = []  # job, rows to feed, nodes to extend
        for job in jobs:
            chosen = job.growth.begin_level(job.expansion.beam)
            if not chosen:
                continue
            rows = job.growth.feed(chosen)
            if len(rows) > left:
                self._step_level(batch, level)
                batch, left = [], self._executor.max_rows
            batch.append((job, rows, chosen))
            left -= len(rows)
        if batch:
            self._step_level(batch, level)

    def _step_level(self, batch: Sequence[tuple[DraftJob, list[int], list[int]]], level: int) -> None:
        groups = [self._draft_rows(job, rows, chosen) for job, rows, chosen in batch]
        logits_LV, features_TE = self._run(groups)
        first = 0
        extended: list[tuple[DraftJob, int]] = []
        for job, rows, chosen in batch:
            for j in range(len(rows) - len(chosen), len(rows)):
                if features_TE is not None:
                    job.growth.features[rows[j]] = features_TE[first + j].copy()
                extended.append((job, rows[j]))
            job.growth.settle()
            first += len(rows)
        self._add_children(extended, logits_LV, level)

    def _draft_rows(self, job: DraftJob, rows: list[int], chosen: list[int]) -> RowGroup:
        growth, context = job.growth, job.context
        root_position = context.root_position
        return RowGroup(
            [growth.tokens[node] for node in rows],
            [root_position + growth.depths[node] for node in rows],
            context.cached + growth.stem,
            context.pages,
            range(len(rows) - len(chosen), len(rows)),
            bits=growth.ancestor_bits(rows) if len(rows) > 1 else None,
            features=[growth.features[growth.parents[node]] for node in rows] if self.reads_features else None,
        )

    def _run(self, groups: Sequence[RowGroup]) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        batch = pack_rows(groups)
        self.counts["steps"] += 1
        self.counts["rows"] += len(batch.ids_T)
        result = self._executor.step(batch, want_logits=True, want_features=self.reads_features)
        assert result.logits_LV is not None, "the SSM's executor returns logits"
        assert not self.reads_features or result.features_TE is not None, "a fused-state SSM outputs its states"
        return result.logits_LV, result.features_TE if self.reads_features else None

    def _add_children(self, nodes: Sequence[tuple[DraftJob, int]], logits_LV: NDArray[np.float32], level: int) -> None:
        """Children of each (job, node), whose logits are the rows of ``logits_LV``."""
        most = max(job.expansion.children[level] for job, _ in nodes)
        index_LK, chance_LK = self._executor.top_successors(logits_LV, min(most, logits_LV.shape[1]))
        tokens_LK = self._keep_ids[index_LK]
        for (job, node), tokens, chances, logits_V in zip(
            nodes, tokens_LK.tolist(), chance_LK.tolist(), logits_LV, strict=True
        ):
            if chances[0] <= 0.0:
                self.counts["skipped_not_finite"] += 1
                continue
            width = job.expansion.children[level]
            if job.expansion.beam is not None and job.noise is None:
                job.growth.add_promising(node, tokens[:width], chances[:width], job.request.max_nodes)
                continue
            certain = width if job.noise is None else width - 1
            for token, chance in zip(tokens[:certain], chances[:certain], strict=True):
                job.growth.add(node, token, chance)
            if job.noise is not None:
                self._draw_child(job, job.noise, node, tokens[:certain], logits_V)

    def _draw_child(
        self, job: DraftJob, noise: DraftNoise, node: int, siblings: list[int], logits_V: NDArray[np.float32]
    ) -> None:
        """One child drawn from the SSM's law without ``siblings``; its claimed chance is the mass that is left."""
        law_V = np.zeros(self._vocab_size, np.float64)
        law_V[self._keep_ids] = target_law(logits_V, job.request.params)
        drawn = draft_child(law_V, siblings, noise, job.growth.depths[node])
        if drawn is not None:
            token, child_law_V = drawn
            job.growth.add(node, token, 1.0 - float(law_V[siblings].sum()), child_law_V)


def make(inputs: DrafterInputs) -> SsmDrafter:
    """Raises CapacityError for trees that do not fit the SSM's steps: now, not at their batch size's first round."""
    assert inputs.ssm is not None, "its record runs an SSM"
    part, executor = inputs.ssm
    drafter = SsmDrafter(
        executor,
        inputs.plans[0].expansion,
        inputs.vocab_size,
        keep_ids=None if part.keep_ids is None else np.array(part.keep_ids, np.int64),
        reads_features=bool(part.reads_features),
        sampled=inputs.plans[0].sampled,
        name=inputs.source,
    )
    for plan in inputs.plans:
        drafter.use(plan)
    return drafter

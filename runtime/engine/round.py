"""One round of a micro-batch: each request's rows of the step, and where the time goes.

Owns the rows of a step (token trees to verify, chunks of prompts); the engine decides when it runs and what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flexspec.draft_plan import WorstCase
from flexspec.runtime.drafters.base import DraftRequest
from flexspec.runtime.drafters.planned import Draft
from flexspec.runtime.engine.scheduler import Running
from flexspec.runtime.executors.pages import RowGroup
from flexspec.tree import TokenTree, ancestor_bits


@dataclass(slots=True)
class Clock:
    """Where this process's time in all rounds so far went, in seconds."""

    step_s: float = 0.0  # LLM steps, waiting for other ranks included
    draft_s: float = 0.0
    gather_s: float = 0.0  # moving K/V
    total_s: float = 0.0

    @property
    def overhead_s(self) -> float:
        return self.total_s - self.step_s - self.draft_s - self.gather_s


@dataclass(slots=True)
class Work:
    """One request's part of a step."""

    running: Running
    tree: TokenTree | None  # to verify; None: the rows are a chunk of its prompt
    rows: RowGroup


@dataclass(slots=True)
class Round:
    """A round in flight: its draft, then its step."""

    decoding: list[Running]  # the requests that have a tree in it
    prompts: list[Running]  # requests with prompt tokens still to feed
    draft: Draft | None  # None: no drafting in this round
    began: float  # by time.perf_counter
    work: list[Work] = field(default_factory=list)  # of its step
    draft_s: float = 0.0  # this process's time in the draft so far
    step_s: float = 0.0  # and in the step


def draft_request(running: Running, limits: WorstCase, max_nodes: int) -> DraftRequest:
    """A request's draft: no deeper than it may still commit, less the token that the LLM adds."""
    sequence = running.sequence
    nodes, depth = min(max_nodes, limits.max_nodes), min(sequence.tokens_left - 1, limits.max_depth)
    return DraftRequest(sequence.request_id, sequence.last_token, nodes, depth, sequence.params, sequence.seed)


def tree_work(running: Running, tree: TokenTree) -> Work:
    """The rows of a token tree after the request's committed context."""
    context = running.cached
    positions = [context + depth for depth in tree.depths]
    bits = ancestor_bits(tree.parents) if len(tree) > 1 else None
    return Work(running, tree, RowGroup(tree.tokens, positions, context, running.pages, range(len(tree)), bits))


def prompt_work(prompts: Sequence[Running], rows_left: int) -> list[Work]:
    """The next chunk of each prompt, in order of arrival, as far as the step has room."""
    work = []
    for running in prompts:
        if rows_left <= 0:
            break
        start, prompt = running.cached, running.sequence.prompt_ids
        chunk = prompt[start : start + rows_left]
        last = start + len(chunk) == len(prompt)
        positions = range(start, start + len(chunk))
        rows = RowGroup(chunk, positions, start, running.pages, [len(chunk) - 1] if last else [])
        work.append(Work(running, None, rows))
        rows_left -= len(chunk)
    return work

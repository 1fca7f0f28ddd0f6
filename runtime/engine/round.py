"""One round of a micro-batch: what each request sends into the step, how its rows are written, where time goes.

Owns the rows of a step (token trees to verify, pieces of prompts); the engine decides when it runs and what follows.
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
    """Where this process's time in all rounds so far went, in seconds: LLM steps (with waiting for other ranks),
    drafting, moving KV, and the rest, in Python."""

    step_s: float = 0.0
    draft_s: float = 0.0
    gather_s: float = 0.0
    total_s: float = 0.0

    @property
    def overhead_s(self) -> float:
        return self.total_s - self.step_s - self.draft_s - self.gather_s


@dataclass(slots=True)
class Work:
    """One request's part of a step: a token tree to verify, or a piece of its prompt (``tree`` None)."""

    running: Running
    tree: TokenTree | None
    rows: RowGroup


@dataclass(slots=True)
class Round:
    """A round in flight: its draft under way, then (``work``) its step. ``began``: time.perf_counter."""

    decoding: list[Running]  # the requests that have a tree in it
    prompts: list[Running]  # requests with prompt tokens still to feed
    draft: Draft | None  # None: no drafting in this round
    began: float
    work: list[Work] = field(default_factory=list)
    draft_s: float = 0.0  # this process's time in the draft so far, and in the step
    step_s: float = 0.0


def draft_request(running: Running, limits: WorstCase, max_nodes: int) -> DraftRequest:
    """What a request asks of the drafters: no deeper than it may still commit, less the token that the LLM adds."""
    sequence = running.sequence
    nodes, depth = min(max_nodes, limits.max_nodes), min(sequence.tokens_left - 1, limits.max_depth)
    return DraftRequest(sequence.request_id, sequence.last_token, nodes, depth, sequence.params)


def tree_work(running: Running, tree: TokenTree) -> Work:
    """The rows of a token tree behind the request's committed context."""
    context = running.cached
    positions = [context + depth for depth in tree.depths]
    bits = ancestor_bits(tree.parents) if len(tree) > 1 else None
    return Work(running, tree, RowGroup(tree.tokens, positions, context, running.pages, range(len(tree)), bits))


def prompt_work(prompts: Sequence[Running], rows_left: int) -> list[Work]:
    """The next piece of each prompt, in order of arrival, as far as the step has room."""
    work = []
    for running in prompts:
        if rows_left <= 0:
            break
        start, prompt = running.cached, running.sequence.prompt_ids
        piece = prompt[start : start + rows_left]
        last = start + len(piece) == len(prompt)
        positions = range(start, start + len(piece))
        rows = RowGroup(piece, positions, start, running.pages, [len(piece) - 1] if last else [])
        work.append(Work(running, None, rows))
        rows_left -= len(piece)
    return work

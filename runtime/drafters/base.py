"""What a drafter is: tokens in, token trees out, one private state per request.

Owns the protocol between the engine and its drafters. A draft may be wrong but never harmful: drafters share
nothing with the LLM's state, draw no noise the verifier uses, and do not raise for what a request contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact.model_record import PartRecord
from flexspec.draft_plan import DraftPlan
from flexspec.runtime.drafters.worth import StepWorth
from flexspec.sampling import SamplingParams
from flexspec.tree import TokenTree


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One request's draft of a round."""

    request_id: int
    last_token: int  # the root of the tree
    max_nodes: int  # drafted nodes, without the root
    max_depth: int
    params: SamplingParams
    seed: int = 0  # of the request's noise: its own, or the fresh one of its sequence


class Drafter(Protocol):
    """Proposes token trees for a batch of requests.

    The engine calls, per request and in this order: ``begin`` once, ``observe_prompt`` for each prefilled chunk of the
    prompt (only if ``reads_features``), then ``observe`` after every commit (the first one is the token from prefill)
    and ``propose`` before every verify, and ``end`` when the request finishes or is cancelled. Unknown ids are allowed
    everywhere: a request that was never begun gets a root-only tree.
    """

    name: str
    reads_features: bool

    def begin(self, request_id: int, prompt_ids: Sequence[int]) -> None: ...

    def observe_prompt(self, request_id: int, start: int, features_KE: NDArray[np.float32] | None) -> None:
        """LLM features of prompt rows ``start .. start + K - 1``; the first commit repeats those of the last row."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        """One tree per request, in order; each root is the request's last committed token."""
        ...

    def observe(self, request_id: int, committed: Sequence[int], features_KE: NDArray[np.float32] | None) -> None:
        """``features_KE[i]`` is the LLM's feature at the position BEFORE ``committed[i]``: root, accepted nodes."""
        ...

    def end(self, request_id: int) -> None: ...


@runtime_checkable
class ModelDrafter(Drafter, Protocol):
    """A drafter that runs a model, each step of which costs a few percent of a round.

    With ``worth`` set it asks before every level but the first whether the step pays, and records the time of its
    steps; the caller asks for the first.
    """

    worth: StepWorth | None

    def use(self, plan: DraftPlan) -> None:
        """Set the shape and sampling of later trees. Raises CapacityError for trees that the SSM cannot run."""
        ...


@runtime_checkable
class DistantDrafter(ModelDrafter, Protocol):
    """A model drafter that runs on other ranks between ``start`` and ``finish``; drafts finish in the order started.

    Its ``worth`` is asked once for the whole draft, as if all levels were the first.
    """

    def start(self, requests: Sequence[DraftRequest]) -> None: ...

    def finish(self) -> list[TokenTree]:
        """The trees of the oldest draft that has started and not finished."""
        ...


@runtime_checkable
class DraftsElsewhere(Protocol):
    """An LLM's executor whose other ranks can draft too."""

    def drafter(self, part: PartRecord, ranks: tuple[int, ...], local: ModelDrafter | None) -> DistantDrafter:
        """The drafter of an SSM on ``ranks``; ``local``: the one of this process, if it is one of them."""
        ...

"""One step of a model: the batch that goes in, the result that comes out, and the executor that runs it.

Shape letters: T rows of the step (tree nodes or prompt tokens of all requests, packed), R requests, B pages of a
request, W ancestor words, L logit rows, E hidden, V vocab. A row's K/V are written to ``slots_T``; the rows of one
request sit at consecutive slots behind its committed context (slot of row j = context + j, through the page table).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flexspec.types import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Inputs of one step. All arrays are C-contiguous.

    ``contexts_R[r]`` committed tokens of request r already in the cache; its rows are ``starts_R1[r]:starts_R1[r+1]``.
    ``page_table_RB`` pool page of each logical page (unused entries 0). ``ancestors_TW`` as TokenTree.ancestors, local
    to the request; ignored for requests with ``causal_R[r] == 1``, whose rows form a chain (prefill, decode).
    ``logit_rows_L`` rows whose logits are wanted. ``features_TE`` only for models that read hidden features.
    """

    ids_T: NDArray[np.int32]
    positions_T: NDArray[np.int32]
    starts_R1: NDArray[np.int32]
    contexts_R: NDArray[np.int32]
    causal_R: NDArray[np.uint8]
    page_table_RB: NDArray[np.int32]
    ancestors_TW: NDArray[np.uint64]
    logit_rows_L: NDArray[np.int32]
    features_TE: NDArray[np.float32] | None = None

    def slots(self) -> NDArray[np.int32]:
        """Cache slot (page * PAGE_TOKENS + offset) of each row."""
        starts = self.starts_R1
        request_T = np.repeat(np.arange(len(self.contexts_R)), np.diff(starts))
        logical = self.contexts_R[request_T] + np.arange(len(self.ids_T)) - starts[request_T]
        pages = self.page_table_RB[request_T, logical // PAGE_TOKENS]
        slots_T: NDArray[np.int32] = (pages * PAGE_TOKENS + logical % PAGE_TOKENS).astype(np.int32)
        return slots_T


@dataclass(frozen=True, slots=True)
class StepResult:
    """``argmax_L`` is always there (lowest index wins a tie); logits when asked; features if the model has them."""

    argmax_L: NDArray[np.int32]
    logits_LV: NDArray[np.float32] | None
    features_TE: NDArray[np.float32] | None

    @classmethod
    def room_for(
        cls, batch: StepBatch, outputs: int, feature_columns: int, *, want_logits: bool, want_features: bool
    ) -> StepResult:
        """Arrays of a step's sizes to be filled; the argmax is -1, which says that a row has no finite logit."""
        wanted, rows = len(batch.logit_rows_L), len(batch.ids_T)
        return cls(
            np.full(wanted, -1, np.int32),
            np.empty((wanted, outputs), np.float32) if want_logits else None,
            np.empty((rows, feature_columns), np.float32) if want_features and feature_columns else None,
        )

    def arrays(self) -> list[NDArray[np.generic]]:
        """What there is, in the order in which it travels between ranks."""
        return [array for array in (self.argmax_L, self.logits_LV, self.features_TE) if array is not None]


class Executor(Protocol):
    """Runs one model's compiled step over its own paged KV pool."""

    vocab_size: int
    max_rows: int  # most rows (T) of a step
    pages: int  # pages in the pool
    max_positions: int

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult: ...

    def top_successors(self, logits_LV: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Indices and softmax probabilities [L, k] of each row's k largest logits, falling, ties to the lower index.

        A row that is not finite gets probability 0 throughout. ``k`` is at most V.
        """
        ...

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        """Copy K/V of all layers slot by slot, in order; safe when dst <= src ascending (commit's gather)."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class OverlappingExecutor(Executor, Protocol):
    """An executor that takes steps before the results of earlier ones are there; results come in the order of steps."""

    # True if ``start`` returns while other ranks still work on the step. False if this rank runs the whole step: then
    # only remote drafting overlaps it.
    returns_early: bool

    def start(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> None: ...

    def finish(self) -> StepResult:
        """The result of the oldest step that was started and not finished."""
        ...


class AtOnce:
    """Any executor as one that overlaps nothing: a step is run where it starts."""

    returns_early = False

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._results: list[StepResult] = []

    def start(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> None:
        self._results.append(self._executor.step(batch, want_logits=want_logits, want_features=want_features))

    def finish(self) -> StepResult:
        return self._results.pop(0)

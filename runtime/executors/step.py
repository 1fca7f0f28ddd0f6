"""One step of a model: the batch that goes in, the result that comes out, and the executor that runs it.

Shape letters: T rows of the step (tree nodes or prompt tokens of all requests, packed), R requests, B pages of a
request, W ancestor words, L logit rows, E hidden, V vocab. A row's K/V are written to its slot; the rows of one
request have consecutive slots after its committed context (slot of row j = context + j, through the page table).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flexspec.types import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Inputs of one step. All arrays are C-contiguous."""

    ids_T: NDArray[np.int32]
    positions_T: NDArray[np.int32]
    starts_R1: NDArray[np.int32]  # rows of request r: starts_R1[r]:starts_R1[r + 1]
    contexts_R: NDArray[np.int32]  # committed tokens of each request in the cache
    causal_R: NDArray[np.uint8]  # 1: the request's rows form a chain (prefill, decode)
    page_table_RB: NDArray[np.int32]  # pool page of each logical page; unused entries are 0
    ancestors_TW: NDArray[np.uint64]  # as TokenTree.ancestors, local to the request; ignored where it is causal
    logit_rows_L: NDArray[np.int32]  # rows whose logits are wanted
    features_TE: NDArray[np.float32] | None = None  # only for models that read hidden features

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
    """Outputs of one step."""

    argmax_L: NDArray[np.int32]  # the lowest index wins a tie
    logits_LV: NDArray[np.float32] | None  # if wanted
    features_TE: NDArray[np.float32] | None  # if wanted, and the model has them

    @classmethod
    def room_for(
        cls, batch: StepBatch, outputs: int, feature_columns: int, *, want_logits: bool, want_features: bool
    ) -> StepResult:
        """Arrays to be filled, of the step's sizes; the argmax is -1, which means that a row has no finite logit."""
        wanted, rows = len(batch.logit_rows_L), len(batch.ids_T)
        return cls(
            np.full(wanted, -1, np.int32),
            np.empty((wanted, outputs), np.float32) if want_logits else None,
            np.empty((rows, feature_columns), np.float32) if want_features and feature_columns else None,
        )

    def arrays(self) -> list[NDArray[np.generic]]:
        """The arrays there are, in the order in which ranks send them."""
        return [array for array in (self.argmax_L, self.logits_LV, self.features_TE) if array is not None]


class Executor(Protocol):
    """Runs one model's compiled step over its own paged KV pool."""

    vocab_size: int
    max_rows: int  # most rows (T) of a step
    pages: int  # pages in the pool
    max_positions: int

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult: ...

    def top_successors(self, logits_LV: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Indices and softmax probabilities [L, k] of each row's k largest logits, descending, ties to the lower index.

        A row that is not finite gets probability 0 throughout. ``k`` is at most V.
        """
        ...

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        """Copy K/V of all layers slot by slot, in order; safe when dst <= src ascending (commit's gather)."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class OverlappingExecutor(Executor, Protocol):
    """An executor that starts steps before earlier ones have finished; results come in the order of steps."""

    # True if ``start`` returns while other ranks still work on the step. False if this rank runs the whole step: then
    # only remote drafting overlaps it.
    returns_early: bool

    def start(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> None: ...

    def finish(self) -> StepResult:
        """The result of the oldest step that has started and not finished."""
        ...


class AtOnce:
    """Makes any executor an OverlappingExecutor that overlaps nothing: ``start`` runs the step."""

    returns_early = False

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._results: list[StepResult] = []

    def start(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> None:
        self._results.append(self._executor.step(batch, want_logits=want_logits, want_features=want_features))

    def finish(self) -> StepResult:
        return self._results.pop(0)

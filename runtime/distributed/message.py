"""What rank 0 sends to its peers: a step, a KV move, a draft, a stop. Sizes come first and are checked before reading.

A message is a header of eight int64 and, for all but the stop, one run of bytes whose length follows from the sizes. A
step holds its inputs and nothing about requests: peers have no policy. distributed/drafts.py owns the body of a draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexspec.arithmetic import ceil_div
from flexspec.errors import EngineError
from flexspec.runtime.executors.room import Room
from flexspec.runtime.executors.step import StepBatch

STEP, MOVE, STOP, DRAFT, TREES = 1, 2, 3, 4, 5
HEADER_WORDS = 8
MAX_DRAFT_BYTES = 1 << 30
_MAGIC = 0x66737063  # "fspc"
_WANT_LOGITS, _WANT_FEATURES = 1, 2

Bytes = NDArray[np.uint8]  # the body of a message
Header = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepMessage:
    """A received step."""

    batch: StepBatch
    want_logits: bool
    want_features: bool


def encode_step(batch: StepBatch, want_logits: bool, want_features: bool) -> tuple[Header, Bytes]:
    """Header and body. The step has no features: only SSMs read them."""
    assert batch.features_TE is None
    sizes = len(batch.ids_T), len(batch.contexts_R), batch.page_table_RB.shape[1], batch.ancestors_TW.shape[1]
    flags = _WANT_LOGITS * want_logits | _WANT_FEATURES * want_features
    arrays = (
        batch.ancestors_TW, batch.ids_T, batch.positions_T, batch.starts_R1, batch.contexts_R, batch.page_table_RB,
        batch.logit_rows_L, batch.causal_R,
    )  # fmt: skip
    header = np.array([_MAGIC, STEP, *sizes, len(batch.logit_rows_L), flags], np.int64)
    return header, np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])


def encode_move(src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> tuple[Header, Bytes]:
    body = np.concatenate([np.asarray(slots, np.int32) for slots in (src_slots, dst_slots)])
    return np.array([_MAGIC, MOVE, len(src_slots), 0, 0, 0, 0, 0], np.int64), body.view(np.uint8)


def encode_stop() -> Header:
    return np.array([_MAGIC, STOP, 0, 0, 0, 0, 0, 0], np.int64)


def encode_draft(kind: int, body: Bytes) -> Header:
    """The header of a DRAFT or its answer, TREES. Raises EngineError for a body that is too long."""
    header = np.array([_MAGIC, kind, body.nbytes, 0, 0, 0, 0, 0], np.int64)
    check_header(header, Room(0, 0))
    return header


def check_header(header: Header, room: Room) -> tuple[int, int]:
    """Kind of the message and bytes of its body. Raises EngineError for invalid sizes."""
    magic, kind, *sizes = (int(word) for word in header)
    rows, requests, table, words, logits, flags = sizes
    fits = min(sizes) >= 0 and magic == _MAGIC
    is_step = fits and kind == STEP and 0 < requests <= rows <= room.max_rows and logits <= rows
    if is_step and 0 < table <= room.pages and 0 < words <= ceil_div(room.max_rows, 64) and flags <= 3:
        return kind, _step_bytes(rows, requests, table, words, logits)
    if fits and kind == MOVE and rows <= room.max_rows:
        return kind, 8 * rows
    if fits and kind in (DRAFT, TREES) and 0 < rows <= MAX_DRAFT_BYTES:
        return kind, rows
    if fits and kind == STOP:
        return kind, 0
    raise EngineError(
        f"a message with the header {header.tolist()}",
        f"a step of at most {room.max_rows} rows and {room.pages} pages, a move, a draft, or a stop",
        "protocol mismatch between ranks; please report it",
    )


def decode_step(header: Header, body: Bytes) -> StepMessage:
    """The step of a checked header."""
    _, _, rows, requests, table, words, logits, flags = (int(word) for word in header)
    at = 0

    def take(dtype: type[np.generic], *shape: int) -> NDArray[np.generic]:
        nonlocal at
        first, at = at, at + int(np.prod(shape)) * np.dtype(dtype).itemsize
        return body[first:at].view(dtype).reshape(shape)

    ancestors = take(np.uint64, rows, words)
    ids, positions, starts = take(np.int32, rows), take(np.int32, rows), take(np.int32, requests + 1)
    contexts, pages, logit_rows = take(np.int32, requests), take(np.int32, requests, table), take(np.int32, logits)
    causal = take(np.uint8, requests)
    batch = StepBatch(ids, positions, starts, contexts, causal, pages, ancestors, logit_rows)  # type: ignore[arg-type]
    return StepMessage(batch, bool(flags & _WANT_LOGITS), bool(flags & _WANT_FEATURES))


def decode_move(body: Bytes) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Source and target slots."""
    slots = body.view(np.int32)
    return slots[: len(slots) // 2], slots[len(slots) // 2 :]


def _step_bytes(rows: int, requests: int, table: int, words: int, logits: int) -> int:
    return 8 * rows * words + 4 * (2 * rows + requests + 1 + requests + requests * table + logits) + requests

"""A plan of several ranks as one Executor: rank 0 broadcasts a step, all run their shards, results come back.

``DistributedExecutor`` is rank 0's, between the engine and its own shard; what the other ranks do is
distributed/follow.py. Steps overlap: rank 0 runs its shard of one step and starts the next while later stages work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from flexspec.compiler.artifact.model_record import PartRecord
from flexspec.errors import EngineError
from flexspec.host.exits import rank_gone
from flexspec.runtime.distributed.drafts import RemoteDrafter
from flexspec.runtime.distributed.group import ANSWERS, RESULTS, Seat
from flexspec.runtime.distributed.message import (
    DRAFT,
    HEADER_WORDS,
    Bytes,
    Header,
    check_header,
    encode_draft,
    encode_move,
    encode_step,
    encode_stop,
)
from flexspec.runtime.distributed.shards import Shard
from flexspec.runtime.drafters.base import ModelDrafter
from flexspec.runtime.executors.room import Room
from flexspec.runtime.executors.step import StepBatch, StepResult
from flexspec.runtime.executors.step_rules import check_step
from flexspec.runtime.executors.top_successors import top_successors
from flexspec.types import PAGE_TOKENS


@dataclass(slots=True)
class Spent:
    """Where rank 0's time in steps went, in seconds."""

    steps: int = 0
    broadcast_s: float = 0.0
    shard_s: float = 0.0  # in its own shard, exchanges included
    wait_s: float = 0.0  # for results


@dataclass(frozen=True, slots=True)
class _Awaited:
    """The result of a step in flight."""

    result: StepResult
    receives: list[dist.Work]  # that fill its arrays; none if this rank computed it


class DistributedExecutor:
    """Rank 0's side, an OverlappingExecutor. ``source`` is the rank that sends results (0: this rank has them itself).

    Sizes are those of the whole model: ``vocab_size`` columns of logits, ``feature_columns`` of features.
    ``stage_ranks``: all ranks with a part of the LLM; others only draft.
    """

    def __init__(
        self,
        seat: Seat,
        shard: Shard,
        room: Room,
        *,
        source: int,
        stage_ranks: Sequence[int],
        vocab_size: int,
        feature_columns: int,
        max_positions: int,
    ) -> None:
        self.vocab_size, self.max_rows, self.pages = vocab_size, room.max_rows, room.pages
        self.max_positions = min(max_positions, room.pages * PAGE_TOKENS)
        self.returns_early = source != 0
        self._seat, self._shard, self._source, self._feature_columns = seat, shard, source, feature_columns
        self._others = [rank for rank in stage_ranks if rank]
        self.spent = Spent()
        self._awaited: deque[_Awaited] = deque()
        self._lost = ""  # why the other ranks can no longer be reached
        self._lock = threading.RLock()  # close may come from another thread than step

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        """One step of all ranks, with none in flight. Raises EngineError as ``start`` and ``finish``."""
        assert not self._awaited, "steps in flight come first"
        self.start(batch, want_logits=want_logits, want_features=want_features)
        return self.finish()

    def start(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> None:
        """Broadcast a step and run this rank's part. Raises EngineError for invalid sizes, and for a lost rank."""
        check_step(batch, self.max_rows, self.max_positions, self.vocab_size)
        began = time.perf_counter()
        with self._messaging():
            self._send(self._others, *encode_step(batch, want_logits, want_features))
            sent = time.perf_counter()
            awaited = self._expect(batch, want_logits, want_features) if self.returns_early else None
            result = self._shard.step(batch, want_logits=want_logits, want_features=want_features)
            assert (result is None) == (awaited is not None)
            self._awaited.append(awaited or _Awaited(result, []))  # type: ignore[arg-type]
        self.spent.steps += 1
        self.spent.broadcast_s += sent - began
        self.spent.shard_s += time.perf_counter() - sent

    def finish(self) -> StepResult:
        """Results of the oldest step in flight. Raises EngineError when a rank is gone."""
        began = time.perf_counter()
        with self._messaging():
            awaited = self._awaited.popleft()
            for work in awaited.receives:
                work.wait()
        self.spent.wait_s += time.perf_counter() - began
        return awaited.result

    def top_successors(self, logits_LV: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return top_successors(logits_LV, k)

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        """Copy K/V slot by slot, in order, on every rank, at most ``max_rows`` a message. Raises EngineError."""
        with self._messaging():
            for first in range(0, len(src_slots), self.max_rows):
                part = slice(first, first + self.max_rows)
                self._send(self._others, *encode_move(src_slots[part], dst_slots[part]))
            self._shard.move_kv(src_slots, dst_slots)

    def drafter(self, part: PartRecord, ranks: tuple[int, ...], local: ModelDrafter | None) -> RemoteDrafter:
        """The drafter of an SSM on other ranks. Implements drafters/base.py: DraftsElsewhere."""
        peers = [_DraftPeer(self, rank) for rank in ranks if rank]
        reads = bool(part.reads_features)
        return RemoteDrafter(part.name, peers, local, reads_features=reads, clock=time.perf_counter)

    def on_loss(self, report: Callable[[str], None]) -> None:
        """Have ``report`` called, from any thread, with the reason when another rank is gone, also between steps."""
        self._seat.peers.on_loss(report)

    def close(self) -> None:
        """Tell the other ranks to stop, if they can still be reached, and drop this rank's shard. Idempotent."""
        with self._lock:
            if not self._lost:
                try:
                    while self._awaited:
                        self.finish()
                    self._send(range(1, self._seat.world), encode_stop(), np.empty(0, np.uint8))
                    self._seat.commands.flush()
                    self._seat.close()
                except (EngineError, RuntimeError):
                    pass  # a rank that is gone needs no message
                self._lost = self._lost or "the executor was closed"
                self._shard.close()

    def send_draft(self, rank: int, body: Bytes) -> None:
        """Tell a rank to draft. Raises EngineError."""
        with self._messaging():
            self._send([rank], encode_draft(DRAFT, body), body)

    def receive_trees(self, rank: int) -> Bytes:
        """The oldest answer of a rank that drafts. Raises EngineError."""
        with self._messaging():
            header = self._seat.receive(np.empty(HEADER_WORDS, np.int64), rank, ANSWERS)
            _, size = check_header(header, Room(0, 0))
            return self._seat.receive(np.empty(size, np.uint8), rank, ANSWERS)

    @contextmanager
    def _messaging(self) -> Iterator[None]:
        """Hold the lock. A lost rank or a fault inside is final: ranks no longer agree on the next message."""
        with self._lock:
            if self._lost:
                raise EngineError(self._lost, f"{self._seat.world} ranks that answer", "restart the server")
            try:
                yield
            except RuntimeError as error:  # torch.distributed's
                self._lost = self._seat.peers.lost or rank_gone(error)
                raise EngineError(self._lost, f"{self._seat.world} ranks that answer", "restart the server") from None

    def _send(self, ranks: Iterable[int], header: Header, body: Bytes) -> None:
        kind, size = check_header(header, Room(self.max_rows, self.pages))
        assert size == body.nbytes, f"message {kind} of {body.nbytes} bytes, its header says {size}"
        for rank in ranks:
            self._seat.commands.send(torch.from_numpy(header), rank)
            if size:
                self._seat.commands.send(torch.from_numpy(body), rank)

    def _expect(self, batch: StepBatch, want_logits: bool, want_features: bool) -> _Awaited:
        """Begin to receive the last stage's results, in the order of distributed/follow.py's ``_send_result``."""
        result = StepResult.room_for(
            batch, self.vocab_size, self._feature_columns, want_logits=want_logits, want_features=want_features
        )
        return _Awaited(result, [self._seat.expect(array, self._source, RESULTS) for array in result.arrays()])


@dataclass(frozen=True, slots=True)
class _DraftPeer:
    """A connection to one rank that drafts (distributed/drafts.py: DraftPeer)."""

    executor: DistributedExecutor
    rank: int

    def send(self, body: Bytes) -> None:
        self.executor.send_draft(self.rank, body)

    def receive(self) -> Bytes:
        return self.executor.receive_trees(self.rank)

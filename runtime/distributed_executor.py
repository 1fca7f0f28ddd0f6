"""A plan of several ranks as one more Executor: rank 0 tells each step, all ranks run their shard, results come back.

``DistributedExecutor`` is rank 0's, between the engine and its own shard; ``follow`` is all that the other ranks do.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from flexspec.errors import EngineError
from flexspec.runtime.cpu_rank import CpuRank, RankResult
from flexspec.runtime.distributed_group import Seat
from flexspec.runtime.distributed_message import (
    HEADER_WORDS,
    MOVE,
    STOP,
    Bytes,
    Header,
    Room,
    check_header,
    decode_move,
    decode_step,
    encode_move,
    encode_step,
    encode_stop,
)
from flexspec.runtime.step import StepBatch, StepResult
from flexspec.runtime.step_rules import check_finite, check_step
from flexspec.runtime.top_successors import top_successors
from flexspec.types import PAGE_TOKENS


@dataclass(slots=True)
class Spent:
    """Where rank 0's time in steps went, in seconds: telling, its own shard with exchanges, waiting for results."""

    steps: int = 0
    tell_s: float = 0.0
    shard_s: float = 0.0
    wait_s: float = 0.0


class DistributedExecutor:
    """Rank 0's side. ``source`` is the rank that sends results (0: this one has them itself).

    Sizes are those of the whole model: ``vocab_size`` columns of logits, ``feature_columns`` of features.
    """

    def __init__(
        self,
        seat: Seat,
        shard: CpuRank,
        room: Room,
        *,
        source: int,
        vocab_size: int,
        feature_columns: int,
        max_positions: int,
    ) -> None:
        self.vocab_size, self.max_rows, self.pages = vocab_size, room.max_rows, room.pages
        self.max_positions = min(max_positions, room.pages * PAGE_TOKENS)
        self._seat, self._shard, self._source, self._feature_columns = seat, shard, source, feature_columns
        self.spent = Spent()
        self._told: list[tuple[dist.Work, torch.Tensor]] = []  # messages on their way, and their bytes
        self._lost = ""  # why the other ranks cannot be asked any more
        self._lock = threading.Lock()  # close may come from another thread than step

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        """One step of all ranks. Raises EngineError for sizes that do not fit, and when a rank is gone."""
        check_step(batch, self.max_rows, self.max_positions, self.vocab_size)
        with self._lock:
            try:
                began = time.perf_counter()
                self._tell(*encode_step(batch, want_logits, want_features))
                told = time.perf_counter()
                self._seat.begin(len(batch.ids_T), len(batch.logit_rows_L))
                own = self._shard.step(batch, self._seat.meet, want_logits=want_logits, want_features=want_features)
                ran = time.perf_counter()
                result = own if own is not None else self._receive(batch, want_logits, want_features)
                self._wait_told()
                self._note(began, told, ran, time.perf_counter())
            except RuntimeError as error:
                raise self._give_up(error) from None
        check_finite(result.argmax_L)
        return StepResult(result.argmax_L, result.logits_LV, result.features_TE)

    def top_successors(self, logits_LV: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return top_successors(logits_LV, k)

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        """Copy K/V slot by slot, in order, on every rank, at most ``max_rows`` a message. Raises EngineError."""
        with self._lock:
            try:
                for first in range(0, len(src_slots), self.max_rows):
                    part = slice(first, first + self.max_rows)
                    self._tell(*encode_move(src_slots[part], dst_slots[part]))
            except RuntimeError as error:
                raise self._give_up(error) from None
            self._shard.move_kv(src_slots, dst_slots)

    def close(self) -> None:
        """Tell the other ranks to end, if they can still be told, and drop this rank's shard. Idempotent."""
        with self._lock:
            if not self._lost:
                self._lost = "the executor was closed"
                try:
                    self._wait_told()
                    self._broadcast(encode_stop())
                    self._wait_told()
                    self._seat.close()
                except RuntimeError:
                    pass  # a rank that is gone needs no word
                self._shard.close()

    def _note(self, began: float, told: float, ran: float, ended: float) -> None:
        spent = self.spent
        spent.steps += 1
        spent.tell_s += told - began
        spent.shard_s += ran - told
        spent.wait_s += ended - ran

    def _tell(self, header: Header, body: Bytes) -> None:
        if self._lost:
            raise RuntimeError(self._lost)
        self._wait_told()
        kind, size = check_header(header, Room(self.max_rows, self.pages))
        assert size == body.nbytes, f"message {kind} of {body.nbytes} bytes, its header says {size}"
        self._broadcast(header)
        if size:
            self._broadcast(body)

    def _broadcast(self, array: NDArray[np.generic]) -> None:
        """Begin to send: this rank's shard need not wait until the others have woken up."""
        tensor = torch.from_numpy(array)
        self._told.append((dist.broadcast(tensor, 0, self._seat.control, async_op=True), tensor))

    def _wait_told(self) -> None:
        """Until all has been read; before, no more is sent."""
        for work, _ in self._told:
            work.wait()
        self._told.clear()

    def _receive(self, batch: StepBatch, want_logits: bool, want_features: bool) -> RankResult:
        """Results of the last stage, in the order of ``_give``."""
        wanted, rows = len(batch.logit_rows_L), len(batch.ids_T)
        columns = self._feature_columns if want_features else 0
        argmax = np.empty(wanted, np.int32)
        logits = np.empty((wanted, self.vocab_size), np.float32) if want_logits else None
        features = np.empty((rows, columns), np.float32) if columns else None
        for array in (argmax, logits, features):
            if array is not None and array.size:
                dist.recv(torch.from_numpy(array), self._source, self._seat.steps)
        return RankResult(argmax, logits, features)

    def _give_up(self, error: RuntimeError) -> EngineError:
        self._lost = self._lost or f"a rank is gone or silent ({str(error).splitlines()[0]})"
        return EngineError(self._lost, f"{self._seat.world} ranks that answer", "start the server again")


def follow(seat: Seat, shard: CpuRank, room: Room, *, gives: bool, vocab_size: int, feature_columns: int) -> None:
    """Run this rank's shard for each message of rank 0, until the end is told. ``gives``: it sends the results.

    Raises EngineError for a message that cannot be, RuntimeError (torch's own) when another rank is gone.
    """
    header = np.empty(HEADER_WORDS, np.int64)
    while True:
        dist.broadcast(torch.from_numpy(header), 0, seat.control)
        kind, size = check_header(header, room)
        if kind == STOP:
            return
        body = np.empty(size, np.uint8)
        if size:
            dist.broadcast(torch.from_numpy(body), 0, seat.control)
        if kind == MOVE:
            shard.move_kv(*decode_move(body))
            continue
        message = decode_step(header, body)
        batch = message.batch
        seat.begin(len(batch.ids_T), len(batch.logit_rows_L))
        try:
            result = shard.step(batch, seat.meet, want_logits=message.want_logits, want_features=message.want_features)
        except EngineError:  # logits that are not finite: the last to know is rank 0, which ends the engine
            result = _lost(batch, message.want_logits, vocab_size, feature_columns * message.want_features)
        if gives and result is not None:
            _give(seat, result)


def _lost(batch: StepBatch, want_logits: bool, vocab_size: int, columns: int) -> RankResult:
    """A result that rank 0 knows for a failure, of the sizes that it waits for."""
    wanted, rows = len(batch.logit_rows_L), len(batch.ids_T)
    logits = np.zeros((wanted, vocab_size), np.float32) if want_logits else None
    return RankResult(np.full(wanted, -1, np.int32), logits, np.zeros((rows, columns), np.float32) if columns else None)


def _give(seat: Seat, result: RankResult) -> None:
    for array in (result.argmax_L, result.logits_LV, result.features_TE):
        if array is not None and array.size:
            dist.send(torch.from_numpy(np.ascontiguousarray(array)), 0, seat.steps)

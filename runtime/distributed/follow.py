"""What every rank but the first does: run its part of each step, and draft, as rank 0 requests."""

from __future__ import annotations

import numpy as np

from flexspec.errors import EngineError
from flexspec.runtime.distributed.drafts import DraftHost
from flexspec.runtime.distributed.group import ANSWERS, RESULTS, Seat
from flexspec.runtime.distributed.message import (
    DRAFT,
    HEADER_WORDS,
    MOVE,
    STEP,
    STOP,
    TREES,
    Bytes,
    Header,
    check_header,
    decode_move,
    decode_step,
    encode_draft,
)
from flexspec.runtime.distributed.shards import Shard
from flexspec.runtime.executors.room import Room
from flexspec.runtime.executors.step import StepResult


class Follower:
    """A rank with a part of the LLM (``shard``), with SSMs (``host``), or with both.

    ``sends_results``: it sends each step's results to rank 0.
    """

    def __init__(
        self,
        seat: Seat,
        shard: Shard | None,
        host: DraftHost | None,
        room: Room,
        *,
        sends_results: bool,
    ) -> None:
        self._seat, self._shard, self._host, self._room, self._sends_results = seat, shard, host, room, sends_results

    def run(self) -> None:
        """Serve rank 0's messages until it sends STOP.

        Raises EngineError for an invalid message, RuntimeError (torch's own) when another rank is gone.
        """
        header = np.empty(HEADER_WORDS, np.int64)
        while True:
            self._seat.listen(header)
            kind, size = check_header(header, self._room)
            body = self._seat.listen(np.empty(size, np.uint8)) if size else np.empty(0, np.uint8)
            if kind == STOP:
                return
            if kind == STEP and self._shard is not None:
                self._step(self._shard, header, body)
            elif kind == MOVE and self._shard is not None:
                self._shard.move_kv(*decode_move(body))
            elif kind == DRAFT and self._host is not None:
                self._draft(self._host, body)
            else:
                raise EngineError(
                    f"message {kind} to rank {self._seat.rank}", "one for a part that the rank has",
                    "protocol mismatch between ranks; please report it",
                )  # fmt: skip

    def _step(self, shard: Shard, header: Header, body: Bytes) -> None:
        message = decode_step(header, body)
        result = shard.step(message.batch, want_logits=message.want_logits, want_features=message.want_features)
        if self._sends_results and result is not None:
            self._send_result(result)

    def _send_result(self, result: StepResult) -> None:
        for array in result.arrays():
            self._seat.answer(np.ascontiguousarray(array), RESULTS)

    def _draft(self, host: DraftHost, body: Bytes) -> None:
        trees = host.answer(body)
        self._seat.answer(encode_draft(TREES, trees), ANSWERS)
        self._seat.answer(trees, ANSWERS)

"""Executors and drafters whose results come later, in one process: what ranks do, without them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine_runs import Wrapped
from table_ssm import TableSsm

from flexspec.runtime.distributed.drafts import Bytes, DraftHost
from flexspec.runtime.drafters.base import DraftRequest
from flexspec.runtime.drafters.ssm import SsmDrafter
from flexspec.runtime.executors.step import Executor, StepBatch, StepResult
from flexspec.tree import TokenTree


class Held(Wrapped):
    """An executor that holds results back until they are asked for; steps and moves run in the order of the calls."""

    def __init__(self, inner: Executor, *, returns_early: bool = True) -> None:
        super().__init__(inner)
        self.returns_early = returns_early
        self.held: deque[StepResult] = deque()
        self.most = 0  # in flight at the same time

    def start(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> None:
        self.held.append(self.step(batch, want_logits=want_logits, want_features=want_features))
        self.most = max(self.most, len(self.held))

    def finish(self) -> StepResult:
        return self.held.popleft()


class Courier:
    """A DraftPeer for a DraftHost in this process; ``waiting`` are answers nobody has asked for yet."""

    def __init__(self, host: DraftHost) -> None:
        self._host = host
        self.waiting: deque[Bytes] = deque()
        self.sent = 0

    def send(self, body: Bytes) -> None:
        self.sent += 1
        self.waiting.append(self._host.answer(body))

    def receive(self) -> Bytes:
        return self.waiting.popleft()


class Noting(SsmDrafter):
    """An SSM's drafter that notes which requests it was asked for."""

    asked: list[list[int]]
    table: TableSsm

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        self.asked = [*getattr(self, "asked", []), [request.request_id for request in requests]]
        return super().propose(requests)

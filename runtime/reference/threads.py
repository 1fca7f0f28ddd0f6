"""All ranks of a partitioned model on the generated CPU backend in one process, one thread each.

For tests of the programs and for tools: a served model runs its ranks in processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.partition.rank_part import RankPart
from flexspec.compiler.partition.shares import cut_weights
from flexspec.errors import EngineError
from flexspec.runtime.executors.cpu_rank import CpuRank
from flexspec.runtime.executors.step import StepBatch, StepResult
from flexspec.runtime.executors.top_successors import top_successors
from flexspec.runtime.reference.transport import ThreadMeetings
from flexspec.types import PAGE_TOKENS


class CpuRanks:
    """An Executor (runtime/executors/step.py) over the lowered parts of all ranks.

    ``get(name)`` gives a whole weight of the model in float32; a rank has ``threads`` of its own. Raises WeightError,
    CompileError, ToolchainError.
    """

    def __init__(
        self,
        parts: Sequence[RankPart],
        get: Callable[[str], NDArray[np.float32]],
        *,
        pages: int,
        max_rows: int = 96,
        threads: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        self.pages, self.max_rows = pages, max_rows
        self._timeout_s = timeout_s
        self._ranks = [
            CpuRank(p, cut_weights(p.weights, get), pages=pages, max_rows=max_rows, threads=threads) for p in parts
        ]
        self._threads = ThreadPoolExecutor(len(parts))
        last = next(part for part in parts if part.results)
        vocab = last.graph.types()[last.graph.outputs[0]].dims[1]
        assert isinstance(vocab, int)
        self.vocab_size = vocab
        self.max_positions = min(pages * PAGE_TOKENS, *(rank.facts.max_positions for rank in self._ranks))

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        """One step of all ranks. Raises the error of the first that failed, EngineError when they deadlock."""
        meetings = ThreadMeetings(self._timeout_s)

        def run(rank: CpuRank) -> StepResult | None:
            try:
                return rank.step(batch, meetings.meet, want_logits=want_logits, want_features=want_features)
            except BaseException as error:
                meetings.give_up(error)
                return None

        results = [future.result() for future in [self._threads.submit(run, rank) for rank in self._ranks]]
        if meetings.cause is not None:
            raise meetings.cause
        first, *others = (result for result in results if result is not None)
        if any(not np.array_equal(first.argmax_L, other.argmax_L) for other in others):
            raise EngineError("ranks of the last stage that differ in their results", "one result", "report this fault")
        return first

    def top_successors(self, logits_LV: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return top_successors(logits_LV, k)

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        """Copy K/V slot by slot, in order, on every rank."""
        for rank in self._ranks:
            rank.move_kv(src_slots, dst_slots)

    def close(self) -> None:
        """Drop the pools and the weights, and end the threads."""
        self._threads.shutdown()
        for rank in self._ranks:
            rank.close()

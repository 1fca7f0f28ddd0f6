"""A rank's part of the LLM, ready to run: generated CPU program or Triton kernels, joined to its seat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flexspec.graph import Graph, Node
from flexspec.kernels.reference import TORCH_DTYPES
from flexspec.runtime.distributed.group import Seat
from flexspec.runtime.executors.cpu_rank import CpuRank
from flexspec.runtime.executors.step import StepBatch, StepResult
from flexspec.runtime.executors.step_times import StepTimes

if TYPE_CHECKING:
    from flexspec.kernels.gpu.aot import CompiledVariant
    from flexspec.kernels.gpu.family import Variant
    from flexspec.runtime.executors.triton_device import TritonDevice


class Shard(Protocol):
    """One rank's part of each step."""

    def join(self, seat: Seat) -> None:
        """Exchange with the other ranks through it from now on; comes before any step."""
        ...

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool) -> StepResult | None:
        """None from a rank that is not in the last stage. All ranks must want the same.

        Raises RuntimeError (torch's own) when another rank is gone, EngineError for logits that are not finite.
        """
        ...

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None: ...

    def close(self) -> None: ...


class CpuShard:
    """A generated CPU program."""

    _seat: Seat

    def __init__(self, rank: CpuRank) -> None:
        self._rank = rank

    def keep_times(self) -> StepTimes:
        """As CpuRank's."""
        return self._rank.keep_times()

    def join(self, seat: Seat) -> None:
        self._seat = seat

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool) -> StepResult | None:
        self._seat.begin(len(batch.ids_T), len(batch.logit_rows_L))
        return self._rank.step(batch, self._seat.meet, want_logits=want_logits, want_features=want_features)

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        self._rank.move_kv(src_slots, dst_slots)

    def close(self) -> None:
        self._rank.close()


class TritonShard:
    """Triton kernels and torch, on this rank's GPU or in the interpreter. Rows travel in the dtype of the graph.

    Raises what TritonExecutor raises.
    """

    _seat: Seat

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, NDArray[Any]],
        *,
        pages: int,
        max_rows: int,
        device: TritonDevice,
        compiled: Mapping[Variant, CompiledVariant],
        max_tree_tokens: int,
    ) -> None:
        from flexspec.runtime.executors.triton import TritonExecutor

        self._executor = TritonExecutor(
            graph, weights, pages, max_rows, device, compiled=compiled, max_tree_tokens=max_tree_tokens,
            exchange=self._exchange,
        )  # fmt: skip

    def join(self, seat: Seat) -> None:
        self._seat = seat

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool) -> StepResult | None:
        self._seat.begin(len(batch.ids_T), len(batch.logit_rows_L))
        return self._executor.run(batch, want_logits=want_logits, want_features=want_features)

    def _exchange(self, node: Node, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Where a rank only receives, the operand is an integer that counts rows, and is not sent."""
        operand = operands[0] if operands[0].is_floating_point() else None
        dtype = TORCH_DTYPES[node.outputs[0].type.dtype]
        return self._seat.exchange(node, operand, dtype, self._executor.device)

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        self._executor.move_kv(src_slots, dst_slots)

    def close(self) -> None:
        self._executor.close()

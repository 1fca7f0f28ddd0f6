"""An Executor on the torch references: slow, plain, and the oracle for the generated backends.

Legend: T rows, L logit rows, E hidden, V vocab, P pages, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flexspec.errors import WeightError
from flexspec.graph import Graph
from flexspec.kernels.reference import TORCH_DTYPES, run_graph, weight_tensor
from flexspec.ops.bounds import IDS, POSITIONS, input_bound
from flexspec.runtime.executors.step import StepBatch, StepResult
from flexspec.runtime.executors.step_rules import best_L, check_step
from flexspec.runtime.executors.top_successors import top_successors
from flexspec.types import PAGE_TOKENS, Role


class ReferenceExecutor:
    """Runs any step graph, canonical or lowered, over its own paged pool (see runtime/executors/step.py: Executor).

    ``weights`` are float32 arrays by canonical name; they are rounded to the graph's weight format and dtype.
    Raises WeightError for a missing weight or a wrong shape.
    """

    def __init__(self, graph: Graph, weights: Mapping[str, NDArray[np.float32]], pages: int, max_rows: int) -> None:
        self.graph, self.pages, self.max_rows = graph, pages, max_rows
        vocab = graph.types()[graph.outputs[0]].dims[1]
        assert isinstance(vocab, int)
        self.vocab_size = vocab
        self.max_positions, self._id_rows = input_bound(graph, POSITIONS), input_bound(graph, IDS)
        self._weights = weight_tensors(graph, weights)
        self._caches = empty_caches(graph, pages)
        caches = len(self._caches)
        self._new_names = graph.outputs[len(graph.outputs) - caches :]
        self._feature_names = graph.outputs[1 : len(graph.outputs) - caches]

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        """One step; the pool is updated. Raises EngineError for rows, ids or positions beyond what there is."""
        check_step(batch, self.max_rows, self.max_positions, self._id_rows)
        outputs = run_graph(self.graph, {**step_tensors(self.graph, batch), **self._weights, **self._caches})
        for name, new in zip(list(self._caches), self._new_names, strict=True):
            self._caches[name] = outputs[new]
        features = [outputs[name] for name in self._feature_names]
        return step_result(outputs[self.graph.outputs[0]], features, want_logits, want_features)

    def top_successors(self, logits_LV: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return top_successors(logits_LV, k)

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        """Copy K/V of all layers slot by slot, in order."""
        for cache in self._caches.values():
            move_slots(cache, src_slots, dst_slots)

    def read_kv(self, slots: NDArray[np.int32]) -> dict[str, NDArray[np.float32]]:
        """K and V of some slots, float32 [n,G,D] by cache name; for tests that compare caches."""
        index = torch.from_numpy(np.asarray(slots, np.int64))
        return {name: cache.flatten(0, 1)[index].float().numpy() for name, cache in self._caches.items()}

    def close(self) -> None:
        """Drop the pool and the weights."""
        self._caches.clear()
        self._weights.clear()


def step_result(
    logits: torch.Tensor, features: Sequence[torch.Tensor], want_logits: bool, want_features: bool
) -> StepResult:
    """A step's result, from the logits and features that the graph returned."""
    logits_LV = logits.float().numpy()
    return StepResult(
        argmax_L=best_L(logits_LV),
        logits_LV=logits_LV if want_logits else None,
        features_TE=torch.cat([feature.float() for feature in features], -1).numpy()
        if features and want_features
        else None,
    )


def step_tensors(graph: Graph, batch: StepBatch) -> dict[str, torch.Tensor]:
    """The step inputs that a graph reads."""
    arrays: dict[str, NDArray[np.generic]] = {
        "ids_T": batch.ids_T,
        "positions_T": batch.positions_T,
        "starts_R1": batch.starts_R1,
        "contexts_R": batch.contexts_R,
        "causal_R": batch.causal_R,
        "page_table_RB": batch.page_table_RB,
        "ancestors_TW": batch.ancestors_TW,
        "logit_rows_L": batch.logit_rows_L,
    }
    if any(value.name == "features_TE" for value in graph.inputs):
        assert batch.features_TE is not None, "this model reads features"
        arrays["features_TE"] = batch.features_TE
    return {
        value.name: torch.from_numpy(np.array(arrays[value.name])).to(TORCH_DTYPES[value.type.dtype])
        for value in graph.inputs
        if value.name in arrays
    }


def empty_caches(graph: Graph, pages: int) -> dict[str, torch.Tensor]:
    """Zeroed caches of a pool of so many pages."""
    return {
        value.name: torch.zeros(pages, *_ints(value.type.dims[1:]), dtype=TORCH_DTYPES[value.type.dtype])
        for value in graph.inputs_of(Role.KV)
    }


def move_slots(cache: torch.Tensor, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
    """Copy slots of one cache, one after another."""
    slots = cache.flatten(0, 1)
    for src, dst in zip(src_slots.tolist(), dst_slots.tolist(), strict=True):
        slots[dst] = slots[src]


def _ints(dims: tuple[int | str, ...]) -> list[int]:
    assert dims[0] == PAGE_TOKENS
    return [dim for dim in dims if isinstance(dim, int)]


def weight_tensors(graph: Graph, weights: Mapping[str, NDArray[np.float32]]) -> dict[str, torch.Tensor]:
    """The weights that a graph reads, in its dtypes. Raises WeightError for a missing weight or a wrong shape."""
    converted: dict[str, torch.Tensor] = {}
    for value in graph.inputs_of(Role.WEIGHT):
        if value.name not in weights:
            raise WeightError(f"no weight {value.name}", f"{value.type}", "load the checkpoint that the graph is for")
        array = weights[value.name]
        if array.shape != value.type.dims:
            raise WeightError(
                f"weight {value.name} of shape {list(array.shape)}", f"{value.type}", "load the matching checkpoint"
            )
        converted[value.name] = weight_tensor(value, array)
    return converted

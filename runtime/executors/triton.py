"""An Executor on a GPU: generated Triton kernels where an operator has one, torch for everything else.

Legend: T rows, R requests, L logit rows, E hidden, V vocab, P pages, G kv heads, H query heads, D head dim. Owns the
pool, the weights on the device and the walk over a step graph. Operators whose record names a kernel family run on its
kernels; the others run on the torch references of their records. With TRITON_INTERPRET=1 the same code runs on
the CPU: slow, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flexspec.errors import CompileError, WeightError
from flexspec.graph import Attr, Graph, Node, as_int
from flexspec.kernels.gpu.aot import CompiledVariant
from flexspec.kernels.gpu.attention.launch import SPLIT_KEYS
from flexspec.kernels.gpu.family import Kernels, KernelStep, Run, Variant, family_of, kernel_variants
from flexspec.kernels.reference import TORCH_DTYPES, weight_tensor
from flexspec.ops.bounds import IDS, POSITIONS, input_bound
from flexspec.ops.record import Reference, record_of, sent_values
from flexspec.runtime.executors.step import StepBatch, StepResult
from flexspec.runtime.executors.step_rules import check_step
from flexspec.runtime.executors.top_successors import top_successors
from flexspec.runtime.executors.triton_device import GPU, TritonDevice
from flexspec.types import Role

# A node where ranks meet and this rank's operands -> its result.
Exchange = Callable[[Node, Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Instruction:
    """One node, prepared: the kernels of ``variant`` if its operator has some, else the operator's reference."""

    node: Node
    attrs: dict[str, Attr]
    reference: Reference
    variant: Variant | None
    run: Run[Any] | None  # of the variant's family
    dead: tuple[str, ...]  # values that nothing reads after it
    exchanges: bool  # rows with other ranks


class TritonExecutor:
    """Runs any step graph, canonical or lowered, over its own paged pool (see runtime/executors/step.py: Executor).

    ``weights`` are arrays by canonical name: float32, or of each weight's dtype as artifacts store them (bfloat16 as
    uint16 bits). Matrix products are torch's, which reads no other weight format: other formats are expanded to their
    dtype, here or when packaged (kernels/package/gpu.py). ``compiled`` are kernels compiled ahead of time, by variant:
    binaries run on NVIDIA GPUs, sources anywhere else; missing ones are compiled at their first use.
    ``max_tree_tokens`` fixes the row tile and the least number of ancestor words. ``exchange`` does the exchanges with
    other ranks, if the graph is one rank's part.
    Raises WeightError for a missing weight or a wrong shape, ToolchainError when the device cannot run the kernels.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, NDArray[Any]],
        pages: int,
        max_rows: int,
        device: TritonDevice = GPU,
        *,
        compiled: Mapping[Variant, CompiledVariant] | None = None,
        max_tree_tokens: int = 64,
        split_keys: int = SPLIT_KEYS,
        exchange: Exchange | None = None,
    ) -> None:
        device.check(graph)
        self.graph, self.pages, self.max_rows, self.device = graph, pages, max_rows, torch.device(device.torch_name)
        self._load = device.kernels
        self._exchange = exchange
        sent = sent_values(graph)
        types = graph.types()
        results = [name for name in graph.outputs if types[name].role is not Role.KV and name not in sent]
        self._logits, self._feature_names = results[:1], results[1:]
        self.vocab_size = as_int(types[results[0]].dims[1]) if results else 0
        self.max_positions, self._id_rows = input_bound(graph, POSITIONS), input_bound(graph, IDS)
        self._compiled, self._split_keys = compiled or {}, split_keys
        self._program = _instructions(graph, max_tree_tokens, alone=exchange is None)
        self._weights = _place_weights(graph, weights, self.device)
        caches = graph.inputs_of(Role.KV)
        self._caches = {
            value.name: torch.zeros(
                pages, *map(as_int, value.type.dims[1:]), dtype=TORCH_DTYPES[value.type.dtype], device=self.device
            )
            for value in caches
        }
        self._kernels: dict[Variant, Kernels] = {}

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        """One step; the pool is updated in place. Raises EngineError as ``check_step``, and for a failed launch."""
        result = self.run(batch, want_logits=want_logits, want_features=want_features)
        assert result is not None, "a whole model has logits"
        return result

    @torch.no_grad()
    def run(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult | None:
        """As ``step``; None from a rank without logits. Also raises what ``exchange`` raises."""
        check_step(batch, self.max_rows, self.max_positions, self._id_rows)
        values = self._step_inputs(batch) | self._weights | self._caches
        step = KernelStep(batch, self.device, self._split_keys)
        for instruction in self._program:
            inputs = [values[name] for name in instruction.node.inputs]
            if instruction.run is not None:
                results = instruction.run(self._kernels_for, instruction.variant, instruction.attrs, inputs, step)
            elif instruction.exchanges:
                assert self._exchange is not None
                results = (self._exchange(instruction.node, inputs),)
            else:
                results = instruction.reference(inputs, instruction.attrs)
            values.update((value.name, result) for value, result in zip(instruction.node.outputs, results, strict=True))
            for name in instruction.dead:
                del values[name]
        if not self._logits:
            return None
        logits_LV = values[self._logits[0]].float()
        features = [values[name].float() for name in self._feature_names] if want_features else []
        return StepResult(
            argmax_L=_best(logits_LV),
            logits_LV=logits_LV.cpu().numpy() if want_logits else None,
            features_TE=torch.cat(features, -1).cpu().numpy() if features else None,
        )

    def top_successors(self, logits_LV: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return top_successors(logits_LV, k)

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        """Copy K/V of all layers slot by slot, in order; in one gather when no copy reads what an earlier one wrote."""
        written: set[int] = set()
        ordered = False
        for src, dst in zip(src_slots.tolist(), dst_slots.tolist(), strict=True):
            ordered |= src in written or dst in written
            written.add(dst)
        moves = [(src_slots, dst_slots)]
        if ordered:
            moves = [(src_slots[i : i + 1], dst_slots[i : i + 1]) for i in range(len(src_slots))]
        for sources, targets in moves:
            src, dst = self._index(sources), self._index(targets)
            for cache in self._caches.values():
                slots = cache.flatten(0, 1)
                slots[dst] = slots[src]

    def read_kv(self, slots: NDArray[np.int32]) -> dict[str, NDArray[np.float32]]:
        """K and V of some slots, float32 [n, G, D] by cache name; for tests that compare caches."""
        index = self._index(slots)
        return {name: cache.flatten(0, 1)[index].float().cpu().numpy() for name, cache in self._caches.items()}

    def close(self) -> None:
        """Drop pool, weights and kernels."""
        self._caches.clear()
        self._weights.clear()
        self._kernels.clear()

    def _kernels_for(self, variant: Variant) -> Kernels:
        if variant not in self._kernels:
            self._kernels[variant] = self._load(variant, self._compiled.get(variant))
        return self._kernels[variant]

    def _step_inputs(self, batch: StepBatch) -> dict[str, torch.Tensor]:
        """The step's arrays that the graph declares, on the device (fields and inputs have the same names)."""
        reads_features = any(value.name == "features_TE" for value in self.graph.inputs)
        assert batch.features_TE is not None or not reads_features, "this model reads features"
        return {
            value.name: torch.from_numpy(np.array(getattr(batch, value.name)))
            .to(TORCH_DTYPES[value.type.dtype])
            .to(self.device)
            for value in self.graph.inputs
            if value.type.role not in (Role.WEIGHT, Role.KV)
        }

    def _index(self, slots: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(slots, np.int64)).to(self.device)


def _best(logits_LV: torch.Tensor) -> NDArray[np.int32]:
    """Argmax, on the device: the lowest index wins (torch's is the first maximum), -1 where nothing is finite."""
    shown = torch.where(logits_LV.isnan(), -torch.inf, logits_LV)
    best, index = shown.max(-1).values, shown.argmax(-1)
    chosen: NDArray[np.int32] = torch.where(best > -torch.inf, index, -1).to(torch.int32).cpu().numpy()
    return chosen


def _instructions(graph: Graph, max_tree_tokens: int, *, alone: bool) -> tuple[_Instruction, ...]:
    last = {name: at for at, node in enumerate(graph.nodes) for name in node.inputs}
    pinned = {*graph.outputs, *(value.name for value in graph.inputs)}
    variants = kernel_variants(graph, max_tree_tokens)
    program = []
    for at, node in enumerate(graph.nodes):
        record, attrs = record_of(node), dict(node.attrs)
        if record.exchange and alone:  # its reference needs the operands of all ranks
            raise CompileError(f"graph {graph.name} meets other ranks at a {node.op}", "one rank", "plan one rank")
        names = {*node.inputs, *(value.name for value in node.outputs)} - pinned
        dead = tuple(sorted(name for name in names if last.get(name, at) <= at))
        variant = variants.get(at)
        run = None if variant is None else family_of(variant.family).run
        program.append(_Instruction(node, attrs, record.reference, variant, run, dead, record.exchange))
    return tuple(program)


def _place_weights(graph: Graph, weights: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    placed: dict[str, torch.Tensor] = {}
    for value in graph.inputs_of(Role.WEIGHT):
        array = weights.get(value.name)
        if array is None or array.shape != value.type.dims:
            problem = "is missing" if array is None else f"has shape {list(array.shape)}"
            raise WeightError(f"weight {value.name} {problem}", str(value.type), "load the checkpoint of this graph")
        placed[value.name] = weight_tensor(value, array).to(device)
    return placed

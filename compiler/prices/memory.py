"""The one memory function: bytes of a rank by purpose, and the error that lists them.

``rank_bytes`` is for planned ranks, ``graph_bytes`` for graphs about to be served. Both take KV slots from kv_slots.py,
activations from profile.peak_bytes and scratch from scratch_bytes; a test checks that they agree.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from flexspec.compiler.prices.machine import Device
from flexspec.compiler.prices.profile import ModelProfile, Sizes, peak_bytes, step_sizes
from flexspec.errors import CapacityError
from flexspec.graph import Graph
from flexspec.kv_slots import STEP_ROWS, pages_of, request_slots
from flexspec.types import PAGE_TOKENS, Role


@dataclass(frozen=True, slots=True)
class Workload:
    """What must fit at the same time."""

    requests: int  # in flight
    context_tokens: int  # committed, of each request
    tree_rows: int  # of the largest tree, including its root
    step_rows: int = STEP_ROWS  # of a prompt chunk

    @property
    def verify_rows(self) -> int:
        return self.requests * self.tree_rows

    def sizes(self) -> Sizes:
        """Dim sizes of the largest step: a prompt chunk may have more rows than all trees, but has no logits."""
        rows = max(self.verify_rows, self.step_rows)
        letters = step_sizes(rows, self.requests, self.context_tokens)
        return {**letters, "L": self.verify_rows, "P": cache_tokens(self) // PAGE_TOKENS}


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes of one rank by purpose."""

    weights: int
    kv: int
    activations: int
    tree_scratch: int
    buffers: int
    ssm: int
    reserve: int
    limit: int  # memory of the device

    @property
    def total(self) -> int:
        stored = self.weights + self.kv + self.ssm + self.reserve
        return stored + self.activations + self.tree_scratch + self.buffers

    @property
    def free(self) -> int:
        return self.limit - self.total

    @property
    def fits(self) -> bool:
        return self.free >= 0

    def table(self) -> list[tuple[str, int]]:
        """Labelled rows, with the total and the limit."""
        parts = [(field.name.replace("_", " "), getattr(self, field.name)) for field in fields(self)][:-1]
        return [*parts, ("total", self.total), ("device has", self.limit)]

    def refuse(self, where: str) -> CapacityError:
        """The error of a rank that does not fit."""
        rows = ", ".join(f"{name} {count / 1e9:.2f} GB" for name, count in self.table())
        return CapacityError(
            f"{where} needs {self.total / 1e9:.2f} GB: {rows}", "a rank that fits its device",
            "use more devices, a higher degree, fewer requests or a shorter context",
        )  # fmt: skip


def rank_bytes(
    model: ModelProfile,
    degree: int,
    blocks: int,
    work: Workload,
    device: Device,
    *,
    first: bool,
    last: bool,
    ssm: int = 0,
) -> RankBytes:
    """The largest rank of a stage of ``blocks`` blocks at ``degree``; ``first`` and ``last``: its position.

    ``ssm``: bytes of the SSMs that live on it (see :func:`ssm_bytes`).
    """
    rank = model.ranks[degree]
    unit_bytes = rank.weight_bytes
    weights = blocks * unit_bytes["block"] + first * unit_bytes["front"] + last * unit_bytes["back"]
    weights -= rank.shared_bytes if first and last else 0
    sizes = work.sizes()
    return RankBytes(
        weights=weights,
        kv=blocks * rank.kv_bytes_per_token * cache_tokens(work),
        activations=rank.peak_bytes(sizes, back=last),
        tree_scratch=scratch_bytes(sizes, model.config.vocab_size if last else 0),
        buffers=0 if first and last and degree == 1 else 2 * sizes["T"] * model.hidden_bytes,
        ssm=ssm,
        reserve=int(device.reserve_bytes.effective),
        limit=int(device.memory_bytes.effective),
    )


def graph_bytes(graph: Graph, sizes: Sizes) -> RankBytes:
    """A whole lowered model with a pool of ``sizes["P"]`` pages; ``limit``, ``reserve`` and ``ssm`` are 0."""
    logits = [node.outputs[0].type for node in graph.nodes if node.outputs[0].name == graph.outputs[0]]
    columns = logits[0].dims[-1] if logits and logits[0].role is Role.ACTIVATION and logits[0].dims[0] == "L" else 0
    return RankBytes(
        weights=sum(value.type.bytes({}) for value in graph.inputs_of(Role.WEIGHT)),
        kv=sum(value.type.bytes(sizes) for value in graph.inputs_of(Role.KV)),
        activations=peak_bytes(graph.nodes, sizes),
        tree_scratch=scratch_bytes(sizes, columns if isinstance(columns, int) else 0),
        buffers=0,
        ssm=0,
        reserve=0,
        limit=0,
    )


def scratch_bytes(sizes: Sizes, columns: int) -> int:
    """For acceptance and masks: float32 copies of ``columns`` logits, ancestor words, one index per page."""
    return 4 * sizes["L"] * columns + 8 * sizes["T"] * sizes["W"] + 4 * sizes["P"]


def cache_tokens(work: Workload) -> int:
    """KV slots of all requests, rounded up to whole pages."""
    pages = pages_of(request_slots(work.context_tokens, work.tree_rows - 1))
    return work.requests * pages * PAGE_TOKENS


@lru_cache(maxsize=1 << 10)
def ssm_bytes(ssm: ModelProfile, work: Workload) -> int:
    """Weights, cache and activations of an SSM on one device."""
    rank = ssm.ranks[1]
    kv = ssm.blocks * rank.kv_bytes_per_token * cache_tokens(work)
    return ssm.weight_bytes() + kv + rank.peak_bytes(work.sizes(), back=True)

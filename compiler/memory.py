"""The one memory function: bytes of a rank, by what they are for, and the refusal with that table."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

from flexspec.compiler.machine import Device
from flexspec.compiler.profile import ModelProfile, step_sizes
from flexspec.errors import CapacityError
from flexspec.types import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Workload:
    """What must fit at the same time: requests in flight, committed tokens of each, largest tree (root included)."""

    requests: int
    context_tokens: int
    tree_rows: int


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes of one rank by purpose; ``limit`` is what the device has."""

    weights: int
    kv: int
    activations: int
    tree_scratch: int
    buffers: int
    ssm: int
    reserve: int
    limit: int

    @property
    def total(self) -> int:
        return int(sum(astuple(self))) - self.limit

    @property
    def free(self) -> int:
        return self.limit - self.total

    @property
    def fits(self) -> bool:
        return self.free >= 0

    def table(self) -> list[tuple[str, int]]:
        """Rows for people, with the total and the limit."""
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
    """The largest rank of a stage of ``blocks`` blocks at ``degree``; ``first`` and ``last``: where it stands.

    ``ssm``: bytes of the SSMs that live on it too (see :func:`ssm_bytes`).
    """
    rank = model.ranks[degree]
    held = rank.weight_bytes
    weights = blocks * held["block"] + first * held["front"] + last * held["back"]
    weights -= rank.shared_bytes if first and last else 0
    rows = work.requests * work.tree_rows
    sizes = step_sizes(rows, work.requests, work.context_tokens)
    logits = 4 * rows * model.config.vocab_size if last else 0  # float32 copies for acceptance
    ancestors = 8 * rows * sizes["W"] + 4 * work.requests * sizes["B"]
    return RankBytes(
        weights=weights,
        kv=blocks * rank.kv_bytes_per_token * cache_tokens(work),
        activations=rank.peak_bytes(sizes, back=last),
        tree_scratch=logits + ancestors,
        buffers=0 if first and last and degree == 1 else 2 * rows * model.hidden_bytes,
        ssm=ssm,
        reserve=int(device.reserve_bytes.effective),
        limit=int(device.memory_bytes.effective),
    )


def cache_tokens(work: Workload) -> int:
    """Slots of all requests: committed tokens and the tree's rows, in whole pages."""
    pages = -(-(work.context_tokens + work.tree_rows) // PAGE_TOKENS)
    return work.requests * pages * PAGE_TOKENS


def ssm_bytes(ssm: ModelProfile, work: Workload) -> int:
    """Weights, cache and activations of an SSM on one device."""
    rank = ssm.ranks[1]
    rows = work.requests * work.tree_rows
    sizes = step_sizes(rows, work.requests, work.context_tokens)
    kv = ssm.blocks * rank.kv_bytes_per_token * cache_tokens(work)
    return ssm.weight_bytes() + kv + rank.peak_bytes(sizes, back=True)

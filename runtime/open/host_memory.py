"""Memory of this host, as the kernel reports it, and the check at startup that the served models fit into it.

A pool is mapped when it is created and filled when it is used: a server with too large a one would be killed later.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.compiler.prices.memory import RankBytes, graph_bytes
from flexspec.compiler.prices.profile import step_sizes
from flexspec.errors import CapacityError
from flexspec.host.control_group import CGROUP, PROC, memory_limits
from flexspec.types import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of this host."""

    total_bytes: int  # that this process may ever have
    free_bytes: int  # now, page cache counted as free


@dataclass(frozen=True, slots=True)
class ModelPool:
    """A model, or a rank's part of one, that will run here."""

    graph: str  # its name in the artifact
    pages: int  # of its pool


def host_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> HostMemory | None:
    """What the kernel reports of this host and of a container's control group; None if it reports nothing."""
    try:
        rows = [line.split(":") for line in (proc / "meminfo").read_text().splitlines()]
        sizes = {name: int(value.split()[0]) * 1024 for name, value in rows}
        memory = HostMemory(sizes["MemTotal"], sizes["MemAvailable"])
    except (OSError, KeyError, ValueError, IndexError):
        return _by_sysconf()
    for group in memory_limits(proc, cgroup):
        free = max(0, group.limit_bytes - max(0, group.used_bytes - group.cache_bytes))
        memory = HostMemory(min(memory.total_bytes, group.limit_bytes), min(memory.free_bytes, free))
    return memory


def _by_sysconf() -> HostMemory | None:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    return HostMemory(total, total) if total > 0 else None  # what is in use is not known: only the total counts


def check_memory(
    artifact: OpenedArtifact, pools: Sequence[ModelPool], rows: int, requests: int, host: HostMemory | None = None
) -> None:
    """Refuse pools that do not fit: raises CapacityError with the byte table.

    ``rows`` and ``requests`` are those of the largest step. Weights are mapped files, which the kernel can drop and
    read again: with them all must fit into the machine, without them into what is free.
    """
    host = host or host_memory()
    if host is None or not pools:
        return
    needed, page_bytes = _needed_bytes(artifact, pools, rows, requests)
    pages = max(pool.pages for pool in pools)
    unmapped = needed.kv + needed.activations + needed.tree_scratch
    room = min(host.free_bytes - unmapped, host.total_bytes - needed.total)
    if room >= 0:
        return
    fits = max(0, pages + room // page_bytes) * PAGE_TOKENS
    table = ", ".join(f"{name} {count / 1e9:.2f} GB" for name, count in needed.table()[:-1] if count)
    raise CapacityError(
        f"a KV pool of {pages * PAGE_TOKENS} tokens: {table}; this machine has {host.total_bytes / 1e9:.2f} GB, "
        f"{host.free_bytes / 1e9:.2f} GB of it free",
        f"a pool of at most {fits} tokens besides the weights" if fits else "a model that this machine can hold",
        f"serve with --kv-tokens {fits} or less" if fits else "serve it on a larger machine",
    )


def _needed_bytes(
    artifact: OpenedArtifact, pools: Sequence[ModelPool], rows: int, requests: int
) -> tuple[RankBytes, int]:
    """All models together, and bytes of one more page in each pool."""
    total, page_bytes = RankBytes(0, 0, 0, 0, 0, 0, 0, 0), 0
    for pool in pools:
        graph = artifact.graph(pool.graph)
        sizes = {**step_sizes(rows, requests, pool.pages * PAGE_TOKENS // requests), "P": pool.pages}
        model = graph_bytes(graph, sizes)
        page_bytes += model.kv // pool.pages + 4
        total = replace(
            total,
            weights=total.weights + model.weights,
            kv=total.kv + model.kv,
            activations=total.activations + model.activations,
            tree_scratch=total.tree_scratch + model.tree_scratch,
        )
    return total, page_bytes

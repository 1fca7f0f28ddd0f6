"""Memory of this host, as the kernel tells it, and the check at start that what is served fits into it.

A pool is mapped when it is made and filled when it is used: one too large would start, and be killed later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.compiler.prices.memory import RankBytes, graph_bytes
from flexspec.compiler.prices.profile import step_sizes
from flexspec.errors import CapacityError
from flexspec.types import PAGE_TOKENS

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """``total_bytes`` that this process may ever have; ``free_bytes`` of them now, page cache counted as free."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class ModelPool:
    """A model, or a rank's part of one, that will run here: its graph's name in the artifact, pages of its pool."""

    graph: str
    pages: int


def host_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> HostMemory | None:
    """What the kernel says of this host and of the control group that a container is; None where it says nothing."""
    try:
        rows = [line.split(":") for line in (proc / "meminfo").read_text().splitlines()]
        sizes = {name: int(value.split()[0]) * 1024 for name, value in rows}
        found = HostMemory(sizes["MemTotal"], sizes["MemAvailable"])
    except (OSError, KeyError, ValueError, IndexError):
        return _by_sysconf()
    for limit, used, cache in _group_limits(cgroup):
        free = max(0, limit - max(0, used - cache))
        found = HostMemory(min(found.total_bytes, limit), min(found.free_bytes, free))
    return found


def _by_sysconf() -> HostMemory | None:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    return HostMemory(total, total) if total > 0 else None  # what is in use is not told: only the whole counts


def _group_limits(cgroup: Path) -> Iterator[tuple[int, int, int]]:
    """(limit, in use, of that page cache) of the control group, in either version's files; none without a limit."""
    for limit, used, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_cache"),
    ):
        try:
            rows = dict(line.split() for line in (cgroup / stat).read_text().splitlines())
            yield int((cgroup / limit).read_text()), int((cgroup / used).read_text()), int(rows[cache])
        except (OSError, KeyError, ValueError):  # not there, or "max": no limit
            continue


def check_memory(
    artifact: OpenedArtifact, pools: Sequence[ModelPool], rows: int, requests: int, host: HostMemory | None = None
) -> None:
    """Refuse pools that cannot be: raises CapacityError with the byte table.

    ``rows`` and ``requests`` are those of the largest step. Weights are mapped files, which the kernel can drop and
    read again: they must fit into the machine, what is not mapped must fit into what is free.
    """
    host = host or host_memory()
    if host is None or not pools:
        return
    held, per_page = _held(artifact, pools, rows, requests)
    pages = max(pool.pages for pool in pools)
    own = held.kv + held.activations + held.tree_scratch
    room = min(host.free_bytes - own, host.total_bytes - held.total)
    if room >= 0:
        return
    fits = max(0, pages + room // per_page) * PAGE_TOKENS
    table = ", ".join(f"{name} {count / 1e9:.2f} GB" for name, count in held.table()[:-1] if count)
    raise CapacityError(
        f"a KV pool of {pages * PAGE_TOKENS} tokens: {table}; this machine has {host.total_bytes / 1e9:.2f} GB, "
        f"{host.free_bytes / 1e9:.2f} GB of it free",
        f"a pool of at most {fits} tokens beside the weights" if fits else "a model that this machine can hold",
        f"serve with --kv-tokens {fits} or less" if fits else "serve it on a larger machine",
    )


def _held(artifact: OpenedArtifact, pools: Sequence[ModelPool], rows: int, requests: int) -> tuple[RankBytes, int]:
    """All models together, and bytes of one page more in each pool."""
    held, per_page = RankBytes(0, 0, 0, 0, 0, 0, 0, 0), 0
    for pool in pools:
        graph = artifact.graph(pool.graph)
        sizes = {**step_sizes(rows, requests, pool.pages * PAGE_TOKENS // requests), "P": pool.pages}
        each = graph_bytes(graph, sizes)
        per_page += each.kv // pool.pages + 4
        held = replace(
            held,
            weights=held.weights + each.weights,
            kv=held.kv + each.kv,
            activations=held.activations + each.activations,
            tree_scratch=held.tree_scratch + each.tree_scratch,
        )
    return held, per_page

"""What Linux control groups (both versions) allow this process: the tightest limit on the way up from its own group.

A container manager or systemd limits the group of a service, which may lie below the mount's root; the root itself then
says nothing. Inside a container the mount often is the group, and the path in /proc/self/cgroup is not below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory of one control group, in bytes."""

    limit_bytes: int
    used_bytes: int  # page cache included
    cache_bytes: int  # of it page cache, which the kernel can drop


def memory_limits(proc: Path = PROC, cgroup: Path = CGROUP) -> list[MemoryLimit]:
    """The limit of every group above this process that has one."""
    limits = []
    for folder, names in _groups(
        proc,
        cgroup,
        "memory",
        ("memory.max", "memory.current", "file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    ):
        limit, used, cache = names
        try:
            rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            limits.append(MemoryLimit(_number(folder / limit), _number(folder / used), int(rows.get(cache, 0))))
        except (OSError, ValueError):  # not there, or "max": no limit
            continue
    return limits


def cpu_quota(proc: Path = PROC, cgroup: Path = CGROUP) -> float | None:
    """Cores' worth of time that the tightest group gives (``docker --cpus``); None without a quota."""
    quotas = []
    for folder, names in _groups(proc, cgroup, "cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = (int(word) for name in names for word in (folder / name).read_text().split())
        except (OSError, ValueError):  # not there, or "max 100000"
            continue
        if quota > 0 and period > 0:  # version 1 says -1 for no quota
            quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(
    proc: Path, cgroup: Path, controller: str, unified: tuple[str, ...], version_1: tuple[str, ...]
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Folders of the groups above this process, its own first, and the names of the files there."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    rows = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    paths = {names: path for _, names, path in rows}
    yield from ((folder, unified) for folder in _upwards(cgroup, paths.get("", "/")))
    own = next((names for names in paths if controller in names.split(",")), controller)
    for mount in {controller, own}:
        yield from ((folder, version_1) for folder in _upwards(cgroup / mount, paths.get(own, "/")))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    if not mount.joinpath(*parts).is_dir():
        parts = []  # the mount is the group itself
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


def _number(path: Path) -> int:
    return int(path.read_text())

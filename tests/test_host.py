"""What the host lets the process use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexspec.host import cores
from flexspec.host.control_group import MemoryLimit, cpu_quota, memory_limits
from flexspec.host.cores import usable_cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
def test_only_cores_that_the_process_may_run_on_are_counted() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert usable_cores() == len(before)


def test_without_affinity_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


@pytest.mark.parametrize(("quota", "least"), [(None, 6), (0.5, 1), (1.0, 1), (3.99, 3), (64.0, 6)])
def test_threads_beyond_the_quota_are_not_started(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, least: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert usable_cores() == least


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc" / "self", cgroup="4:memory:/a/b\n3:cpu,cpuacct:/a\n0::/system.slice/fs.service")
    return tmp_path / "proc"


NO_CACHE = {"memory__stat": "file 0"}


def test_the_tightest_group_on_the_way_up_counts(proc: Path, tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    service = mount / "system.slice" / "fs.service"
    write(service, memory__max="600", memory__current="7", cpu__max="max 100000", **NO_CACHE)
    write(service.parent, memory__max="500", memory__current="9", cpu__max="250000 100000", **NO_CACHE)
    write(mount, memory__max="max", memory__current="9", cpu__max="400000 100000", **NO_CACHE)
    assert memory_limits(proc, mount) == [MemoryLimit(600, 7, 0), MemoryLimit(500, 9, 0)]
    assert cpu_quota(proc, mount) == 2.5


def test_version_1_has_a_mount_for_each_controller(proc: Path, tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    used = {"memory__usage_in_bytes": "40", "memory__stat": "total_cache 30"}
    write(mount / "memory" / "a" / "b", memory__limit_in_bytes="100", **used)
    write(mount / "memory", memory__limit_in_bytes="9223372036854771712", **used)
    write(mount / "cpu,cpuacct" / "a", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    write(mount / "cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert memory_limits(proc, mount) == [MemoryLimit(100, 40, 30), MemoryLimit(9223372036854771712, 40, 30)]
    assert cpu_quota(proc, mount) == 1.5


def test_in_a_container_the_mount_is_the_group(proc: Path, tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    write(mount, memory__max="300", memory__current="1", cpu__max="100000 100000", **NO_CACHE)
    assert memory_limits(proc, mount) == [MemoryLimit(300, 1, 0)]
    assert cpu_quota(proc, mount) == 1.0


@pytest.mark.parametrize("rows", ["", "nonsense", "0::/../../etc", "1:name=systemd:/x"])
def test_what_says_nothing_limits_nothing(tmp_path: Path, rows: str) -> None:
    write(tmp_path / "proc" / "self", cgroup=rows)
    assert memory_limits(tmp_path / "proc", tmp_path) == [] and cpu_quota(tmp_path / "proc", tmp_path) is None
    assert memory_limits(tmp_path / "none", tmp_path) == [] and cpu_quota(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(
    ("soft", "hard", "after", "told"), [(64, 8192, 4096, 0), (64, 256, 256, 1), (8192, 8192, 8192, 0)]
)
def test_the_soft_limit_of_open_files_is_raised(soft: int, hard: int, after: int, told: int) -> None:
    script = (
        "import resource, sys; from flexspec.host.open_files import *\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))\n"
        "print(raise_open_files() is not None, open_file_limits()[0])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(soft), str(hard)], capture_output=True, text=True)
    assert done.stdout.split() == [str(bool(told)), str(after)], done.stderr

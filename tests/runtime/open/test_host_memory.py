"""A pool that the host cannot hold is refused at start, with the byte table; one that it can hold is not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import artifacts
import pytest

from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.compiler.artifact.plan import Plan, Stage
from flexspec.draft_plan import DraftLadder, DraftPlan
from flexspec.errors import CapacityError
from flexspec.runtime.open import capacity, host_memory
from flexspec.runtime.open.drafters import choose_ladder
from flexspec.runtime.open.engine import open_engine
from flexspec.runtime.open.host_memory import HostMemory, ModelPool, check_memory
from flexspec.runtime.open.serve_options import ServeOptions

MEMINFO = "MemTotal:       24000 kB\nMemFree:          100 kB\nMemAvailable:   20000 kB\n"


@pytest.fixture(scope="module")
def artifact() -> Path:
    return artifacts.tiny_artifact()


def test_serving_refuses_a_pool_that_the_machine_cannot_hold(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size that the message names is the largest that starts."""
    host = HostMemory(60_000_000, 40_000_000)
    monkeypatch.setattr(host_memory, "host_memory", lambda: host)

    def start(kv_tokens: int) -> None:
        open_engine(artifact, ServeOptions(kv_tokens=kv_tokens, measure=False)).close()

    with pytest.raises(
        CapacityError, match=r"weights .* GB, kv .* GB, activations .*has 0.06 GB, 0.04 GB of it"
    ) as told:
        start(1 << 24)
    found = re.search(r"--kv-tokens (\d+) or less", str(told.value))
    assert found
    most = int(found[1])
    start(most)
    with pytest.raises(CapacityError):
        start(most + 32)


def test_weights_are_mapped_and_need_not_be_free(artifact: Path) -> None:
    opened, pools = OpenedArtifact.at(artifact), [ModelPool("llm", 4), ModelPool("ssm", 4)]
    held, _ = host_memory._needed_bytes(opened, pools, 64, 4)
    own = held.total - held.weights
    assert held.weights > 0 and held.kv > 0
    check_memory(opened, pools, 64, 4, HostMemory(held.total, own))
    for short in (HostMemory(held.total - 1, own), HostMemory(held.total, own - 1)):
        with pytest.raises(CapacityError):
            check_memory(opened, pools, 64, 4, short)
    with pytest.raises(CapacityError, match="a model that this machine can hold"):
        check_memory(opened, pools, 64, 4, HostMemory(held.weights // 2, own))


def test_ranks_of_one_host_are_counted_together(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[list[ModelPool]] = []
    monkeypatch.setattr(capacity, "check_memory", lambda _, pools, *sizes: counted.append(pools))
    stages = (Stage(0, 1, (0, 1)), Stage(1, 2, (2,)))
    plan = Plan(stages, ((1, 3),), DraftLadder.of(DraftPlan.parse("chain:2/sources=ssm")), "hand")
    opened = replace(OpenedArtifact.at(artifact), plan=plan)
    ladder = choose_ladder("auto", opened)
    for ranks in (range(0, 2), range(2, 4), ()):
        capacity.check_room(opened, ladder, ServeOptions(kv_tokens=3200), ranks)
    assert [[pool.graph for pool in pools] for pools in counted] == [
        ["llm.rank0", "llm.rank1", "ssm"], ["llm.rank2", "ssm"], ["llm", "ssm"],
    ]  # fmt: skip
    assert [pool.pages for pool in counted[0]][:2] == [100, 100] and counted[0][2].pages < 100
    capacity.check_room(opened, ladder, ServeOptions(device="cuda"))
    assert len(counted) == 3


def test_what_the_kernel_tells(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert host_memory.host_memory(tmp_path, tmp_path / "none") == HostMemory(24_000 * 1024, 20_000 * 1024)
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("9000000\n")
    (group / "memory.stat").write_text("anon 8000000\nfile 1000000\n")
    assert host_memory.host_memory(tmp_path, group) == HostMemory(24_000 * 1024, 20_000 * 1024)
    (group / "memory.max").write_text("10000000\n")
    assert host_memory.host_memory(tmp_path, group) == HostMemory(10_000_000, 2_000_000)
    old = group / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("6000000")
    (old / "memory.usage_in_bytes").write_text("5000000")
    (old / "memory.stat").write_text("total_cache 1000000\n")
    assert host_memory.host_memory(tmp_path, group) == HostMemory(6_000_000, 2_000_000)
    (tmp_path / "meminfo").write_text("MemTotal: 1\n")
    whole = host_memory.host_memory(tmp_path, group)
    assert whole is None or whole.total_bytes == whole.free_bytes > 0
    here = host_memory.host_memory()
    assert here is None or 0 < here.free_bytes <= here.total_bytes

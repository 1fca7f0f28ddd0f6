"""``flexspec calibrate``: a machine file from this machine, which the planner can use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import artifacts
import numpy as np
import pytest

from flexspec.builder import GraphBuilder
from flexspec.cli import main as cli
from flexspec.compiler.prices.machine import Constant, open_machine
from flexspec.errors import MachineError
from flexspec.runtime.executors.step import StepBatch
from flexspec.runtime.executors.step_times import StepTimes
from flexspec.runtime.measure.calibrate import memory_share, shortest_us, time_nodes, time_steps
from flexspec.runtime.open.host_memory import HostMemory, host_memory
from flexspec.types import DType


@pytest.mark.slow(reason="measures this machine")
def test_a_tiny_artifact_gives_a_machine_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact, out = artifacts.compile_tiny(tmp_path, with_ssm=False, draft="off"), tmp_path / "here.toml"
    assert cli.main(["calibrate", str(artifact), "-o", str(out), "--ranks", "2", "--no-links"]) == 0
    machine = open_machine(str(out))
    assert (machine.name, machine.devices) == ("here", 2)
    assert "flexspec calibrate on tiny.fspec" in machine.kinds[0].device.bandwidth_bytes_per_s.origin
    total = host_memory()
    memory, peak = machine.kinds[0].device.memory_bytes, machine.kinds[0].device.flops_per_s
    assert total is not None and memory.value == total.total_bytes and memory.correction == 0.4
    assert "memory of this host" in memory.origin
    found = dict(machine.constants())
    unmeasured = [name for name, each in found.items() if each.origin.startswith("kept from cpu2, not measured here: ")]
    assert len(unmeasured) >= 4 and any("alpha_us" in name for name in unmeasured)  # --no-links
    assert any("f32_flops" in name for name in unmeasured) != peak.origin.startswith("kept")  # one dtype was fitted
    assert "value: cpu2's peak, kept" in machine.kinds[0].device.bandwidth_bytes_per_s.origin
    assert 'origin = "kept from cpu2, not measured here"' in out.read_text()  # the link's tables
    assert "rows  predicted ms  measured ms  ratio" in capsys.readouterr().out
    assert cli.main(["calibrate", str(artifact), "-o", str(out), "--ranks", "0"]) == 2


class FakeExecutor:
    """Steps that take the time they are told, on a clock of their own, of a program of embedding and attention."""

    max_rows = 4

    def __init__(self) -> None:
        self.now_us, self.steps = 0.0, 0
        self.times = StepTimes(_stamps=np.zeros(3, np.int64))

    def clock(self) -> float:
        return self.now_us / 1e6

    def keep_times(self, nodes: int) -> StepTimes:
        assert nodes == 2
        return self.times

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> None:
        """20 us and 5 a row of attention behind 3 of the embedding; every other step is held up for 1 ms."""
        rows, held_up = len(batch.ids_T), 1000 * (self.steps % 4 == 3)
        self.steps += 1
        begin, embedded = self.now_us, self.now_us + 3
        self.now_us = embedded + 20 + 5 * rows + held_up
        stamps = self.times._stamps
        assert stamps is not None and not want_logits
        stamps[:] = np.array([begin, embedded, self.now_us]) * 1000
        self.times.note(int(begin * 1000), int(self.now_us * 1000))


def test_a_step_is_its_lower_quartile_and_other_executors_are_busy_meanwhile() -> None:
    first: Any = FakeExecutor()
    other: Any = FakeExecutor()
    assert time_steps([first, other], first.clock) == pytest.approx({1: 28, 2: 33, 4: 43})  # up to its 4 rows
    assert other.steps >= 3 * 10, "once at least beside each size and repeat"


def test_nodes_are_timed_by_their_stamps() -> None:
    b = GraphBuilder("two", DType.F32)
    x = b.input("x", ("T", 8))
    (y,) = b.call("add", (x, x), {})
    graph = b.finish(b.call("add", (y, x), {})[0])
    first: Any = FakeExecutor()
    nodes_us = time_nodes(first, [], graph, 512)
    assert {rows: us.tolist() for rows, us in nodes_us.items()} == {1: [3, 25], 2: [3, 30], 4: [3, 40]}
    assert shortest_us(np.array([0.0, 7.5, 3.0])) == 3.0, "0 is a node without code"


def test_memory_is_shared_by_ranks() -> None:
    shipped, reserve = Constant(9e9, 1.0, "datasheet"), Constant(5e8, 1.0, "guess")
    host = HostMemory(10 * 10**9, 10**9)
    assert memory_share(shipped, reserve, 4, host, "today").effective == pytest.approx(2e9)
    assert memory_share(shipped, reserve, 4, None, "today").origin == "kept from cpu2, not measured here: datasheet"
    with pytest.raises(MachineError, match="fewer --ranks"):
        memory_share(shipped, reserve, 16, host, "today")

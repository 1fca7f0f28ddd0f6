"""``flexspec calibrate``: a machine file from this machine, which the planner can use."""

from __future__ import annotations

from pathlib import Path

import artifacts
import pytest

from flexspec.cli import main as cli
from flexspec.compiler.prices.machine import Constant, open_machine
from flexspec.errors import MachineError
from flexspec.runtime.measure.calibrate import memory_share
from flexspec.runtime.measure.link_probe import SIZES, probe_links
from flexspec.runtime.open.host_memory import HostMemory, host_memory


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


def test_links_between_two_processes_are_measured() -> None:
    pytest.importorskip("torch")
    transfers, reduces = probe_links(2)
    assert set(transfers) == set(reduces) == set(SIZES)
    assert all(us > 0 for us in (*transfers.values(), *reduces.values()))


def test_memory_is_shared_by_ranks() -> None:
    shipped, reserve = Constant(9e9, 1.0, "datasheet"), Constant(5e8, 1.0, "guess")
    host = HostMemory(10 * 10**9, 10**9)
    assert memory_share(shipped, reserve, 4, host, "today").effective == pytest.approx(2e9)
    assert memory_share(shipped, reserve, 4, None, "today").origin == "kept from cpu2, not measured here: datasheet"
    with pytest.raises(MachineError, match="fewer --ranks"):
        memory_share(shipped, reserve, 16, host, "today")

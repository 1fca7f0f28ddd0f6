"""``flexspec calibrate``: a machine file from this machine, which the planner can use."""

from __future__ import annotations

from pathlib import Path

import artifacts
import pytest

from flexspec.cli import main as cli
from flexspec.compiler.machine import open_machine
from flexspec.runtime.link_probe import SIZES, probe_links


def test_a_tiny_artifact_gives_a_machine_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact, out = artifacts.compile_tiny(tmp_path, with_ssm=False, draft="off"), tmp_path / "here.toml"
    assert cli.main(["calibrate", str(artifact), "-o", str(out), "--ranks", "2", "--no-links"]) == 0
    machine = open_machine(str(out))
    assert (machine.name, machine.devices) == ("here", 2)
    assert "flexspec calibrate on tiny.fspec" in machine.kinds[0].device.bandwidth_bytes_per_s.origin
    assert "rows  predicted ms  measured ms  ratio" in capsys.readouterr().out
    assert cli.main(["calibrate", str(artifact), "-o", str(out), "--ranks", "0"]) == 2


def test_links_between_two_processes_are_measured() -> None:
    pytest.importorskip("torch")
    transfers, reduces = probe_links(2)
    assert set(transfers) == set(reduces) == set(SIZES)
    assert all(us > 0 for us in (*transfers.values(), *reduces.values()))

"""doctor: what it finds comes from the code that compile and serve ask; only what would stop them fails it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from flexspec.cli import doctor
from flexspec.cli.main import main
from flexspec.host.cores import usable_cores
from flexspec.kernels.cpu.build import supported_isas


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in doctor._TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def report(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, object]]]:
    code = main(["doctor", "--json", "--port", "0", *words])
    return code, {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_a_sound_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = report(capsys)
    assert code == 0
    assert f"programs for {supported_isas()[0]}" in str(found["CPU"]["value"])
    assert str(found["cores"]["value"]).startswith(f"{usable_cores()} of ")
    assert not any(finding["fatal"] for finding in found.values())


def test_a_busy_port_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--port", str(port)]) == 1
    assert f"! port         127.0.0.1:{port} cannot be used\n" in capsys.readouterr().out


def test_what_torchrun_left_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, found = report(capsys)
    assert code == 1 and found["environment"]["value"] == "RANK=1 WORLD_SIZE=2"


def test_what_only_costs_time_does_not_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEXSPEC_CACHE", "/dev/null/x")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    code, found = report(capsys)
    assert code == 0
    assert "/dev/null" in str(found["cache"]["problem"]) and "compile needs one" in str(
        found["C++ compiler"]["problem"]
    )


def test_gpus_are_those_that_drivers_show(tmp_path: Path) -> None:
    (tmp_path / "n/0000:01").mkdir(parents=True)
    (tmp_path / "n/0000:01/information").write_text("Model: \t NVIDIA H200\nIRQ:   1\n")
    for node, units in (("0", 0), ("1", 304)):
        (tmp_path / "a" / node).mkdir(parents=True)
        (tmp_path / "a" / node / "properties").write_text(f"simd_count {units}\ngfx_target_version 90402\n")
    assert doctor.gpus(tmp_path / "n", tmp_path / "a") == ["NVIDIA H200", "AMD gfx 90402"]
    assert doctor.gpus(tmp_path / "none", tmp_path / "none") == []

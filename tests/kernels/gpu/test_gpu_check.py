"""The script that checks a GPU machine, as far as it runs without one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from interpreted import ROOT, interpreted

SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def test_machine_without_cuda_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load_script().main(["--out", str(tmp_path / "report.json")]) == 2
    assert capsys.readouterr().out.count("\n") == 1
    assert not (tmp_path / "report.json").exists()


@pytest.mark.slow(reason="kernels in Triton's interpreter")
def test_checks_run_in_the_interpreter(tmp_path: Path) -> None:
    out = tmp_path / "made" / "report.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--interpret", "--out", out], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert len(report["checks"]) == 15 and all(check["error"] <= check["limit"] for check in report["checks"])
    assert "15 of 15 checks passed" in done.stdout and "timings" not in report


def test_failed_check_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = load_script()
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # main sets it; this puts it back afterwards
    monkeypatch.setattr(script, "check_kernels", lambda device: [script.Check("d64", "interpreter", 0.5, 0.1)])
    monkeypatch.setattr(script, "check_bits", lambda device: [script.Check("bits", "interpreter", 0.0, 0.0)])
    monkeypatch.setattr(script, "check_executor", lambda device: script.Check("nan", "executor", float("inf"), 0.1))
    assert script.main(["--interpret", "--out", str(tmp_path / "report.json")]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == 2 and "1 of 3 checks passed" in printed


def timings() -> list[dict[str, Any]]:
    """The timing half with one plain call for each replay, on the CPU: its shapes and figures, not its times."""
    load_script()  # puts the root on the path
    from benchmarks import gpu_timing as timing

    calls: list[float] = []

    def replay_us(run: Any) -> float:
        run()
        calls.append(2.0)
        return 2.0

    timing.replay_us = replay_us
    timing.SHAPES = {"heads": (2, 2, 32), "groups": (4, 1, 32)}
    timing.BATCHES, timing.CONTEXTS, timing.TREES, timing.CACHE_BYTES = (1, 2), (40,), (1, 5), 1
    rows = [vars_of(each) for each in timing.time_attention(copy=1e9, device="cpu")]
    assert len(calls) == 2 * len(rows)
    return rows


def vars_of(timing: Any) -> dict[str, Any]:
    return {name: getattr(timing, name) for name in timing.__slots__}


@pytest.mark.slow(reason="kernels in Triton's interpreter")
def test_timings_count_bytes_and_layers() -> None:
    rows = interpreted(__file__, "timings")
    assert [(row["shape"], row["batch"], row["tree"]) for row in rows] == [
        (shape, batch, tree) for shape in ("heads", "groups") for batch in (1, 2) for tree in (1, 5)
    ]
    for row in rows:
        heads, kv_heads = {"heads": (2, 2), "groups": (4, 1)}[row["shape"]]
        kv = 2 * row["batch"] * (40 + row["tree"]) * kv_heads * 32 * 2
        q_and_out = 2 * row["batch"] * row["tree"] * heads * 32 * 2
        assert row["kernel_us"] == row["sdpa_us"] == 1.0  # two layers in 2 us
        assert row["bytes_per_s"] == pytest.approx((kv + q_and_out) / 1e-6)
        assert row["share"] == pytest.approx(row["bytes_per_s"] / 1e9, abs=1e-3)

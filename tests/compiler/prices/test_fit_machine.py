"""Fits find the constants that made the times, and a machine file says what was fitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planning import constant, make_device, make_link, tiny_profile

from flexspec.compiler.prices.cost import all_reduce_us
from flexspec.compiler.prices.fit_machine import MeasuredSteps, fit_device, fit_link, fit_operator, graph_calls, step_us
from flexspec.compiler.prices.machine import Machine, Peaks, open_machine, shipped_machines
from flexspec.compiler.prices.machine_writer import machine_toml
from flexspec.types import DType

ROWS = (1, 2, 4, 8, 16, 32, 64)


def same(a: Machine, b: Machine) -> bool:
    shapes = [[(k.device.name, k.devices, k.link.name, k.count) for k in m.kinds] for m in (a, b)]
    tables = [[(k.device.measured, k.link.measured, k.device.processor) for k in m.kinds] for m in (a, b)]
    return a.constants() == b.constants() and shapes[0] == shapes[1] and tables[0] == tables[1]


@pytest.mark.parametrize("name", shipped_machines())
def test_written_machines_are_read_back(tmp_path: Path, name: str) -> None:
    path, machine = tmp_path / "m.toml", open_machine(name)
    path.write_text(machine_toml(machine))
    assert same(open_machine(str(path)), machine)


def test_measured_tables_are_read_back(tmp_path: Path) -> None:
    machine = open_machine("cpu2")
    object.__setattr__(machine.kinds[0].link, "measured", {"all_reduce": ((1.0, 5.0), (10.5, 20.25))})
    object.__setattr__(machine.kinds[0].device, "measured", {"linear": ((1.0, 2.0), (2.0, 3.0))})
    path = tmp_path / "m.toml"
    path.write_text(machine_toml(machine, 'gloo "here"'))
    assert same(open_machine(str(path)), machine)


@pytest.mark.slow(reason="fits a machine")
def test_the_fit_finds_what_made_the_times() -> None:
    calls = graph_calls(tiny_profile("gqa").ranks[1].graph)
    real = make_device(bandwidth=3e8, flops=7e9, launch_us=1.0)
    measured = {rows: step_us(real, DType.BF16, calls, rows, 1) for rows in ROWS}
    guess = make_device(bandwidth=1e9, flops=1e10, launch_us=1.0)
    fit = fit_device(guess, MeasuredSteps(DType.BF16, calls, 1, measured), "fit here")
    assert fit.worst_ratio < 1.1
    assert fit.device.bandwidth_bytes_per_s.effective == pytest.approx(3e8, rel=0.1)
    assert fit.device.flops_per_s.effective == pytest.approx(7e9, rel=0.2)
    assert fit.device.flops_per_s.origin == "fit here"
    assert fit.device.f32_flops_per_s == guess.f32_flops_per_s


def test_an_operator_gets_peaks_of_its_own() -> None:
    calls = [call for call in graph_calls(tiny_profile("gqa").ranks[1].graph) if call.record.name == "attention"]
    guess = make_device(bandwidth=1e9, flops=1e10, launch_us=1.0)
    real = replace(guess, operators={"attention": Peaks(constant(2e8), constant(3e9))})
    measured = {rows: step_us(real, DType.BF16, calls, rows, 200) for rows in ROWS}
    fitted = fit_operator(guess, MeasuredSteps(DType.BF16, calls, 200, measured), "fit here")
    peaks = fitted.operators["attention"]
    assert peaks.bandwidth_bytes_per_s.effective == pytest.approx(2e8, rel=0.1)
    assert peaks.flops_per_s.effective == pytest.approx(3e9, rel=0.1)
    assert fitted.bandwidth_bytes_per_s == guess.bandwidth_bytes_per_s  # other operators keep the device's
    assert fitted.peaks(DType.BF16, "linear") == Peaks(guess.bandwidth_bytes_per_s, guess.flops_per_s)


def test_all_that_is_measured_is_written_and_read_back(tmp_path: Path) -> None:
    machine = open_machine("cpu2")
    kind = machine.kinds[0]
    device = replace(kind.device, operators={"attention": Peaks(constant(2.0), constant(3.0))})
    link = replace(kind.link, element_bytes=constant(4.0))
    whole = replace(
        machine,
        kinds=(replace(kind, device=device, link=link),),
        step_us=constant(250.0),
        step_request_us=constant(0.0),
    )
    path = tmp_path / "m.toml"
    path.write_text(machine_toml(whole))
    assert same(open_machine(str(path)), whole)
    names = [name for name, _ in whole.constants()]
    assert f"devices.{device.name}.operators.attention.flops_per_s" in names and "host.step_us" in names


def test_a_link_takes_transfers_and_all_reduces_as_they_were() -> None:
    transfers = {8: 50.0, 1 << 20: 50.0 + 250.0}
    reduces = {8: 300.0, 1 << 14: 290.0, 1 << 20: 1500.0}
    link = fit_link("gloo", transfers, reduces, 2, "measured here")
    assert link.transfer_us(1 << 20) == pytest.approx(300, rel=1e-3)
    assert all_reduce_us(link, 8, 2) == pytest.approx(300, rel=1e-3)
    assert all_reduce_us(link, 1 << 14, 2) == pytest.approx(300, rel=1e-3)  # more bytes never take less
    assert all_reduce_us(link, 1 << 20, 2) == pytest.approx(1500, rel=1e-3)
    assert make_link().measured == {} and constant(2.0).effective == 2.0

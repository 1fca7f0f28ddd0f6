"""Machine files: those that ship open, and every impossible value is a typed error that names its key."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from flexspec.compiler.prices.machine import MACHINES, Machine, open_machine, shipped_machines
from flexspec.errors import MachineError
from repository import ROOT

A10 = (MACHINES / "a10x4x2.toml").read_text()


def opened(tmp_path: Path, text: str) -> Machine:
    path = tmp_path / "m.toml"
    path.write_text(text)
    return open_machine(str(path))


@pytest.mark.parametrize("name", shipped_machines())
def test_shipped_files_open_and_every_constant_has_an_origin(name: str) -> None:
    machine = open_machine(name)
    assert machine.name == name and machine.devices >= 1
    assert all(constant.origin and constant.effective >= 0 for _, constant in machine.constants())


def test_what_the_project_promises_ships() -> None:
    assert {"h100x8", "a10x4x2", "a100x8", "l40sx4", "mi300x8", "h200", "mixed", "cpu2"} <= set(shipped_machines())
    bed = open_machine("a10x4x2")
    assert (bed.devices, bed.nodes, bed.kinds[0].device.memory_bytes.effective) == (8, 2, 24e9)
    assert [bed.device_node(i) for i in (0, 3, 4, 7)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('name = "a10x4x2"', "", "name: missing"),
        ("value = 600e9", "value = 0", "devices.A10.bandwidth_bytes_per_s.value: 0"),
        ("value = 24e9", "value = -1", "devices.A10.memory_bytes.value: -1"),
        ("value = 24e9", "value = nan", "devices.A10.memory_bytes.value: nan"),
        ("value = 600e9", "value = inf", "devices.A10.bandwidth_bytes_per_s.value: inf"),
        ("value = 600e9", "value = 1" + "0" * 400, "devices.A10.bandwidth_bytes_per_s.value: 1000"),
        ("value = 600e9", "value = 1" + "0" * 5000, "m.toml"),
        ("value = 600e9", "value = 1e-300", "devices.A10.bandwidth_bytes_per_s.value: 1e-300"),
        ("devices = 4", "devices = 4.0", "nodes[0].devices: 4.0"),
        ("value = 600e9", "value = true", "devices.A10.bandwidth_bytes_per_s.value: True"),
        ("value = 600e9", 'value = "fast"', "devices.A10.bandwidth_bytes_per_s.value: 'fast'"),
        ("value = 1e9", "value = 24e9", "devices.A10.reserve_bytes"),
        ("launch_us", "lauch_us", "devices.A10.lauch_us: an unknown key; expected perhaps launch_us"),
        ("[network]", 'colour = "red"\n[network]', "nodes[0].colour: an unknown key"),
        ('[network]\nlink = "ethernet100"', "", "network: 2 nodes and no [network]"),
        ('link = "ethernet100"', 'link = "ether"', "network.link: 'ether'"),
        ("devices = 4", "devices = 0", "nodes[0].devices: 0"),
        ("count = 2", "count = 2000", "nodes: 8000 devices"),
        ("correction = 0.8", "correction = 0", "correction: 0"),
        ("[host]", "[host]\n]", "Invalid"),
    ],
)
def test_impossible_values_are_refused(tmp_path: Path, old: str, new: str, place: str) -> None:
    assert old in A10
    with pytest.raises(MachineError) as error:
        opened(tmp_path, A10.replace(old, new, 1))
    assert place in str(error.value) and "Fix:" in str(error.value)


def test_measured_points_rise(tmp_path: Path) -> None:
    table = '[devices.A10.measured.linear]\norigin = "x"\npoints = [[1, 9], [2, 3], [4, 20]]\n\n[links.pcie4]'
    machine = opened(tmp_path, A10.replace("[links.pcie4]", table, 1))
    assert machine.kinds[0].device.measured["linear"] == ((1.0, 9.0), (2.0, 9.0), (4.0, 20.0))
    with pytest.raises(MachineError, match=r"measured.linear.points: \[2, 3\] after"):
        opened(tmp_path, A10.replace("[links.pcie4]", table.replace("[1, 9]", "[2, 9]"), 1))


def test_unknown_machine_names_those_that_ship() -> None:
    with pytest.raises(MachineError, match="h100x8"):
        open_machine("h100x9")
    with pytest.raises(MachineError):
        open_machine(str(Path(__file__)))


def test_the_example_of_the_note_opens(tmp_path: Path) -> None:
    note = (ROOT / "docs" / "design" / "planning.md").read_text()
    block = note[note.index('    name = "mine"') :].split("\n\n")[0]
    machine = opened(tmp_path, textwrap.dedent(block))
    assert (machine.devices, machine.nodes) == (4, 2)

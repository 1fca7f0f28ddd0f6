"""Machines: devices, the nodes that hold them, and the links between, read from TOML files.

Every constant carries the value (datasheet or fit), a correction factor, and where both come from. Effective = value *
correction. Files that ship lie in compiler/machines/; :func:`open_machine` takes a name of one or a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flexspec.compiler.checked_table import Table, read_table
from flexspec.compiler.shipped import find_file, shipped_names
from flexspec.errors import MachineError
from flexspec.types import DType

MACHINES = Path(__file__).parent / "machines"
MAX_DEVICES = 4096
MAX_KINDS = 8

Points = tuple[tuple[float, float], ...]  # (ideal microseconds, measured microseconds), ascending in both


@dataclass(frozen=True, slots=True)
class Constant:
    """``value`` as its source gives it, times ``correction``."""

    value: float
    correction: float
    origin: str

    @property
    def effective(self) -> float:
        return self.value * self.correction


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    """One device. ``measured``: per operator name, what an operator of some ideal time really takes (see cost.py)."""

    name: str
    memory_bytes: Constant
    reserve_bytes: Constant  # held back: context of the driver, allocator's loss
    bandwidth_bytes_per_s: Constant
    flops_per_s: Constant  # matrix products in bf16 or f16
    f32_flops_per_s: Constant
    launch_us: Constant  # per operator
    measured: Mapping[str, Points] = field(default_factory=dict)

    def peak_flops_per_s(self, dtype: DType) -> Constant:
        return self.f32_flops_per_s if dtype is DType.F32 else self.flops_per_s


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """A transfer of n bytes takes ``alpha_us`` + n / ``bandwidth_bytes_per_s``; bandwidth per device and direction."""

    name: str
    alpha_us: Constant
    bandwidth_bytes_per_s: Constant
    measured: Mapping[str, Points] = field(default_factory=dict)  # "all_reduce", likewise

    def transfer_us(self, count_bytes: float) -> float:
        return self.alpha_us.effective + count_bytes / self.bandwidth_bytes_per_s.effective * 1e6


@dataclass(frozen=True, slots=True)
class NodeKind:
    """``count`` equal nodes, each with ``devices`` equal devices that ``link`` connects."""

    device: Device
    devices: int
    link: Link
    count: int


@dataclass(frozen=True, slots=True)
class Machine:
    """``network`` joins nodes; None for one node. ``round_us``, ``request_us``: the host's work in a round."""

    name: str
    about: str
    kinds: tuple[NodeKind, ...]
    network: Link | None
    round_us: Constant
    request_us: Constant

    @property
    def devices(self) -> int:
        return sum(kind.devices * kind.count for kind in self.kinds)

    @property
    def nodes(self) -> int:
        return sum(kind.count for kind in self.kinds)

    def node_kinds(self) -> tuple[NodeKind, ...]:
        """The kind of every node, in the order in which devices are numbered."""
        return tuple(kind for kind in self.kinds for _ in range(kind.count))

    def node_kind(self, node: int) -> int:
        """The number of the kind of node ``node``."""
        return next(i for i, kind in enumerate(self.kinds) if node < sum(k.count for k in self.kinds[: i + 1]))

    def device_node(self, index: int) -> int:
        """The node of device ``index``; devices are numbered node by node."""
        first = 0
        for node, kind in enumerate(self.node_kinds()):
            first += kind.devices
            if index < first:
                return node
        raise PlanIndexError(index, self.devices)

    def constants(self) -> list[tuple[str, Constant]]:
        """Every constant with its place in the file, for the page and for ``--json``."""
        rows: list[tuple[str, Constant]] = [("host.round_us", self.round_us), ("host.request_us", self.request_us)]
        for device in {kind.device.name: kind.device for kind in self.kinds}.values():
            rows += [(f"devices.{device.name}.{name}", getattr(device, name)) for name in DEVICE_KEYS]
        links = {kind.link.name: kind.link for kind in self.kinds if kind.devices > 1}
        if self.network:
            links[self.network.name] = self.network
        for link in links.values():
            rows += [(f"links.{link.name}.{name}", getattr(link, name)) for name in LINK_KEYS]
        return rows


class PlanIndexError(MachineError):
    """A plan names a device that the machine does not have."""

    def __init__(self, index: int, devices: int) -> None:
        super().__init__(f"device {index}", f"0 to {devices - 1}, the machine's devices", "correct the ranks' devices")


DEVICE_KEYS = (
    "memory_bytes",
    "reserve_bytes",
    "bandwidth_bytes_per_s",
    "flops_per_s",
    "f32_flops_per_s",
    "launch_us",
)
LINK_KEYS = ("alpha_us", "bandwidth_bytes_per_s")
_MAY_BE_ZERO = ("reserve_bytes", "launch_us", "alpha_us", "round_us", "request_us")


def shipped_machines() -> list[str]:
    """Names of the machine files that come with flexspec."""
    return shipped_names(MACHINES, ".toml")


def open_machine(name_or_path: str) -> Machine:
    """The machine of a shipped file's name or of a TOML file's path. Raises MachineError."""
    path = find_file(name_or_path, MACHINES, ".toml")
    if path is None:
        raise MachineError(
            f"machine {name_or_path!r}", f"a .toml file or one of {', '.join(shipped_machines())}", "check the name"
        )
    return read_machine(read_table(path, "a machine file", _wrong))


def _wrong(found: str, expected: str) -> MachineError:
    return MachineError(found, expected, "correct the machine file")


def read_machine(table: Table) -> Machine:
    """Check and take over a machine file. Raises MachineError naming the key and what it may hold."""
    name, about = table.text("name"), table.text("about")
    devices = {key: _device(key, part) for key, part in table.tables("devices").items()}
    links = {key: _link(key, part) for key, part in table.tables("links").items()}
    host = table.table("host")
    kinds = tuple(_kind(part, devices, links) for part in table.array("nodes"))
    round_us, request_us = _constant(host, "round_us"), _constant(host, "request_us")
    host.done()
    network = None
    if table.has("network"):
        part = table.table("network")
        network = part.choice("link", links)
        part.done()
    table.done()
    machine = Machine(name, about, kinds, network, round_us, request_us)
    if not 1 <= machine.devices <= MAX_DEVICES or len(kinds) > MAX_KINDS:
        found = f"{machine.devices} devices in {len(kinds)} kinds of nodes"
        raise table.error("nodes", found, f"1 to {MAX_DEVICES} devices and at most {MAX_KINDS} kinds")
    if machine.nodes > 1 and network is None:
        raise table.error("network", f"{machine.nodes} nodes and no [network]", 'a [network] with link = "NAME"')
    return machine


def _kind(part: Table, devices: Mapping[str, Device], links: Mapping[str, Link]) -> NodeKind:
    device = part.choice("device", devices)
    kind = NodeKind(device, part.count("devices", MAX_DEVICES), part.choice("link", links), part.count("count", 4096))
    part.done()
    return kind


def _device(name: str, part: Table) -> Device:
    constants = {key: _constant(part, key) for key in DEVICE_KEYS}
    measured = _measured(part)
    part.done()
    if constants["reserve_bytes"].effective >= constants["memory_bytes"].effective:
        found = f"{constants['reserve_bytes'].effective:.3g} of {constants['memory_bytes'].effective:.3g} bytes"
        raise part.error("reserve_bytes", found, "less than the device's memory")
    return Device(name, **constants, measured=measured)


def _link(name: str, part: Table) -> Link:
    measured = _measured(part)
    link = Link(name, _constant(part, "alpha_us"), _constant(part, "bandwidth_bytes_per_s"), measured)
    part.done()
    return link


def _measured(part: Table) -> dict[str, Points]:
    if not part.has("measured"):
        return {}
    return {name: _points(rows) for name, rows in part.tables("measured").items()}


def _points(part: Table) -> Points:
    points = part.points("points")
    part.text("origin")
    part.done()
    return points


def _constant(part: Table, key: str) -> Constant:
    entry = part.table(key, "a table such as {value = 1.0, correction = 1.0, origin = '...'}")
    value = entry.number("value", zero=key in _MAY_BE_ZERO)
    constant = Constant(value, entry.number("correction"), entry.text("origin"))
    entry.done()
    return constant

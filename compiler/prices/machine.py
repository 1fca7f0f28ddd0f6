"""Machines: devices, the nodes that contain them and the links between them, read from TOML files.

Every constant has a value (datasheet or fit), a correction factor, and the origin of both; effective = value *
correction. Shipped files are in compiler/prices/machines/; :func:`open_machine` takes the name of one, or a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from flexspec.checked_table import Table, read_table
from flexspec.compiler.prices.shipped import find_file, shipped_names, unknown_words
from flexspec.errors import MachineError
from flexspec.types import DType

MACHINES = Path(__file__).parent / "machines"
MAX_DEVICES = 4096
MAX_KINDS = 8

Points = tuple[tuple[float, float], ...]  # (ideal microseconds, measured microseconds), ascending in both


@dataclass(frozen=True, slots=True)
class Constant:
    """A figure of a machine."""

    value: float  # as its source states it
    correction: float  # factor
    origin: str  # of both

    @property
    def effective(self) -> float:
        return self.value * self.correction


NOTHING = Constant(0.0, 1.0, "not in the file: not priced")


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks of one operator whose efficiency differs much from that of the others."""

    bandwidth_bytes_per_s: Constant
    flops_per_s: Constant


@dataclass(frozen=True, slots=True)
class Processor:
    """A kind of device, as far as prices and measurements depend on it."""

    name: str
    joins_best_alone: bool  # in greedy rounds ranks exchange their best logit, not all (executors/cpu_rank.py)
    has_step_clock: bool  # its programs record when every operator ends, so that plans can be measured


PROCESSORS = {
    "cpu": Processor("cpu", joins_best_alone=True, has_step_clock=True),
    "gpu": Processor("gpu", joins_best_alone=False, has_step_clock=False),
}


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    """One device."""

    name: str
    memory_bytes: Constant
    reserve_bytes: Constant  # not available: driver context, allocator overhead
    bandwidth_bytes_per_s: Constant
    flops_per_s: Constant  # matrix products in bf16 or f16
    f32_flops_per_s: Constant
    launch_us: Constant  # per operator
    measured: Mapping[str, Points] = field(default_factory=dict)  # by operator: ideal to measured time (cost.py)
    operators: Mapping[str, Peaks] = field(default_factory=dict)  # by operator, for those with separate peaks
    processor: Processor = PROCESSORS["gpu"]

    def peaks(self, dtype: DType, operator: str | None) -> Peaks:
        """Peaks that an operator is priced with; None: any operator without separate peaks."""
        if operator is not None and operator in self.operators:
            return self.operators[operator]
        flops = self.f32_flops_per_s if dtype is DType.F32 else self.flops_per_s
        return Peaks(self.bandwidth_bytes_per_s, flops)

    def with_peaks(self, dtype: DType, operator: str | None, peaks: Peaks) -> Device:
        """This device with other peaks of an operator; None: of all operators without separate peaks."""
        if operator is not None:
            return replace(self, operators={**self.operators, operator: peaks})
        if dtype is DType.F32:
            return replace(
                self, bandwidth_bytes_per_s=peaks.bandwidth_bytes_per_s, f32_flops_per_s=peaks.flops_per_s
            )  # fmt: skip
        return replace(self, bandwidth_bytes_per_s=peaks.bandwidth_bytes_per_s, flops_per_s=peaks.flops_per_s)


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """A transfer of n bytes takes ``alpha_us`` + n / ``bandwidth_bytes_per_s``."""

    name: str
    alpha_us: Constant
    bandwidth_bytes_per_s: Constant  # per device and direction
    measured: Mapping[str, Points] = field(default_factory=dict)  # of "all_reduce" and "all_gather"
    element_bytes: Constant | None = None  # width of a transferred activation, if not that of its dtype

    def transfer_us(self, count_bytes: float) -> float:
        return self.alpha_us.effective + count_bytes / self.bandwidth_bytes_per_s.effective * 1e6

    def sent_bytes(self, count_bytes: float, dtype: DType) -> float:
        """Bytes transferred for ``count_bytes`` of activations in ``dtype``."""
        return count_bytes * (self.element_bytes.effective / dtype.size_bytes if self.element_bytes else 1.0)


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Equal nodes of a machine, each with equal devices."""

    device: Device
    devices: int  # of each node
    link: Link  # between the devices of a node
    count: int  # nodes


@dataclass(frozen=True, slots=True)
class Machine:
    """Nodes, the network between them, and the cost of the host's work."""

    name: str
    about: str
    kinds: tuple[NodeKind, ...]
    network: Link | None  # None for one node
    round_us: Constant  # the host's work, once per round
    request_us: Constant  # and for every request of the round
    step_us: Constant = NOTHING  # and for every step of a stage or an SSM
    step_request_us: Constant = NOTHING  # and for every request of an SSM's step

    @property
    def devices(self) -> int:
        return sum(kind.devices * kind.count for kind in self.kinds)

    @property
    def nodes(self) -> int:
        return sum(kind.count for kind in self.kinds)

    def node_kinds(self) -> tuple[NodeKind, ...]:
        """The kind of every node, in the order of device numbers."""
        return tuple(kind for kind in self.kinds for _ in range(kind.count))

    def node_kind(self, node: int) -> int:
        """The index of the kind of node ``node``."""
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
        """Every constant with its key in the file, for the page and for ``--json``."""
        rows: list[tuple[str, Constant]] = [
            (f"host.{name}", getattr(self, name)) for name in HOST_KEYS if getattr(self, name) is not NOTHING
        ]
        for device in {kind.device.name: kind.device for kind in self.kinds}.values():
            rows += [(f"devices.{device.name}.{name}", getattr(device, name)) for name in DEVICE_KEYS]
            for operator, peaks in device.operators.items():
                place = f"devices.{device.name}.operators.{operator}"
                rows += [(f"{place}.{name}", getattr(peaks, name)) for name in PEAK_KEYS]
        links = {kind.link.name: kind.link for kind in self.kinds if kind.devices > 1}
        if self.network:
            links[self.network.name] = self.network
        for link in links.values():
            rows += [(f"links.{link.name}.{name}", getattr(link, name)) for name in LINK_KEYS]
            rows += [(f"links.{link.name}.element_bytes", link.element_bytes)] if link.element_bytes else []
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
PEAK_KEYS = ("bandwidth_bytes_per_s", "flops_per_s")
HOST_KEYS = ("round_us", "request_us", "step_us", "step_request_us")
_MAY_BE_ZERO = ("reserve_bytes", "launch_us", "alpha_us", *HOST_KEYS)


def shipped_machines() -> list[str]:
    """Names of the shipped machine files."""
    return shipped_names(MACHINES, ".toml")


def open_machine(name_or_path: str) -> Machine:
    """The machine of a shipped file, by name, or of a TOML file, by path. Raises MachineError."""
    path = find_file(name_or_path, MACHINES, ".toml")
    if path is None:
        unknown, fix = unknown_words(name_or_path)
        raise MachineError(f"machine {unknown}", f"a .toml file or one of {', '.join(shipped_machines())}", fix)
    return read_machine(read_table(path, "a machine file", _wrong))


def _wrong(found: str, expected: str) -> MachineError:
    return MachineError(found, expected, "correct the machine file")


def read_machine(table: Table) -> Machine:
    """The machine of a file's table. Raises MachineError naming the key and its valid values."""
    table.only(("name", "about", "devices", "links", "host", "nodes"), ("network",))
    name, about = table.text("name"), table.text("about")
    devices = {key: _device(key, part) for key, part in table.tables("devices").items()}
    links = {key: _link(key, part) for key, part in table.tables("links").items()}
    host = table.table("host")
    host.only(HOST_KEYS[:2], HOST_KEYS[2:])
    kinds = tuple(_kind(part, devices, links) for part in table.array("nodes"))
    work = {key: _constant(host, key) for key in HOST_KEYS if key in HOST_KEYS[:2] or host.has(key)}
    host.done()
    network = None
    if table.has("network"):
        part = table.table("network")
        part.only(("link",))
        network = part.choice("link", links)
        part.done()
    table.done()
    machine = Machine(name, about, kinds, network, **work)
    if not 1 <= machine.devices <= MAX_DEVICES or len(kinds) > MAX_KINDS:
        found = f"{machine.devices} devices in {len(kinds)} kinds of nodes"
        raise table.error("nodes", found, f"1 to {MAX_DEVICES} devices and at most {MAX_KINDS} kinds")
    if machine.nodes > 1 and network is None:
        raise table.error("network", f"{machine.nodes} nodes and no [network]", 'a [network] with link = "NAME"')
    return machine


def _kind(part: Table, devices: Mapping[str, Device], links: Mapping[str, Link]) -> NodeKind:
    part.only(("device", "devices", "link", "count"))
    device = part.choice("device", devices)
    kind = NodeKind(device, part.count("devices", MAX_DEVICES), part.choice("link", links), part.count("count", 4096))
    part.done()
    return kind


def _device(name: str, part: Table) -> Device:
    part.only(DEVICE_KEYS, ("measured", "operators", "processor"))
    constants = {key: _constant(part, key) for key in DEVICE_KEYS}
    measured = _measured(part)
    operators = part.tables("operators") if part.has("operators") else {}
    peaks = {operator: _peaks(entry) for operator, entry in operators.items()}
    processor = part.choice("processor", PROCESSORS) if part.has("processor") else PROCESSORS["gpu"]
    part.done()
    if constants["reserve_bytes"].effective >= constants["memory_bytes"].effective:
        found = f"{constants['reserve_bytes'].effective:.3g} of {constants['memory_bytes'].effective:.3g} bytes"
        raise part.error("reserve_bytes", found, "less than the device's memory")
    return Device(name, **constants, measured=measured, operators=peaks, processor=processor)


def _peaks(part: Table) -> Peaks:
    part.only(PEAK_KEYS)
    peaks = Peaks(**{key: _constant(part, key) for key in PEAK_KEYS})
    part.done()
    return peaks


def _link(name: str, part: Table) -> Link:
    part.only(LINK_KEYS, ("measured", "element_bytes"))
    measured = _measured(part)
    element = _constant(part, "element_bytes") if part.has("element_bytes") else None
    link = Link(name, _constant(part, "alpha_us"), _constant(part, "bandwidth_bytes_per_s"), measured, element)
    part.done()
    return link


def _measured(part: Table) -> dict[str, Points]:
    if not part.has("measured"):
        return {}
    return {name: _points(rows) for name, rows in part.tables("measured").items()}


def _points(part: Table) -> Points:
    part.only(("points", "origin"))
    points = part.points("points")
    part.text("origin")
    part.done()
    return points


def _constant(part: Table, key: str) -> Constant:
    entry = part.table(key, "a table such as {value = 1.0, correction = 1.0, origin = '...'}")
    entry.only(("value", "correction", "origin"))
    value = entry.number("value", zero=key in _MAY_BE_ZERO)
    constant = Constant(value, entry.number("correction"), entry.text("origin"))
    entry.done()
    return constant

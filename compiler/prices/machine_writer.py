"""Writes a machine as a TOML file from which machine.py reads the same machine."""

from __future__ import annotations

import json
from collections.abc import Mapping

from flexspec.compiler.prices.machine import (
    DEVICE_KEYS,
    HOST_KEYS,
    LINK_KEYS,
    NOTHING,
    PEAK_KEYS,
    Constant,
    Machine,
    Points,
)


def machine_toml(machine: Machine, measured_origin: str = "measured") -> str:
    """The file's text. ``measured_origin``: the origin of its measured tables."""
    lines = [f"name = {_text(machine.name)}", f"about = {_text(machine.about)}", "", "[host]"]
    work = {key: getattr(machine, key) for key in HOST_KEYS}
    lines += [f"{key} = {_constant(constant)}" for key, constant in work.items() if constant is not NOTHING]
    for device in {kind.device.name: kind.device for kind in machine.kinds}.values():
        lines += ["", f"[devices.{_text(device.name)}]"]
        lines += [f"processor = {_text(device.processor.name)}"]
        lines += [f"{key} = {_constant(getattr(device, key))}" for key in DEVICE_KEYS]
        for operator, peaks in device.operators.items():
            lines += ["", f"[devices.{_text(device.name)}.operators.{_text(operator)}]"]
            lines += [f"{key} = {_constant(getattr(peaks, key))}" for key in PEAK_KEYS]
        lines += _measured("devices", device.name, device.measured, measured_origin)
    links = {kind.link.name: kind.link for kind in machine.kinds}
    if machine.network:
        links[machine.network.name] = machine.network
    for link in links.values():
        lines += ["", f"[links.{_text(link.name)}]"]
        lines += [f"{key} = {_constant(getattr(link, key))}" for key in LINK_KEYS]
        lines += [f"element_bytes = {_constant(link.element_bytes)}"] if link.element_bytes else []
        lines += _measured("links", link.name, link.measured, measured_origin)
    for kind in machine.kinds:
        lines += ["", "[[nodes]]", f"device = {_text(kind.device.name)}", f"devices = {kind.devices}"]
        lines += [f"link = {_text(kind.link.name)}", f"count = {kind.count}"]
    if machine.network:
        lines += ["", "[network]", f"link = {_text(machine.network.name)}"]
    return "\n".join(lines) + "\n"


def _measured(section: str, name: str, tables: Mapping[str, Points], origin: str) -> list[str]:
    lines = []
    for key, points in tables.items():
        pairs = ", ".join(f"[{x!r}, {y!r}]" for x, y in points)
        lines += [
            "",
            f"[{section}.{_text(name)}.measured.{_text(key)}]",
            f"origin = {_text(origin)}",
            f"points = [{pairs}]",
        ]
    return lines


def _constant(constant: Constant) -> str:
    origin = _text(constant.origin)
    return f"{{ value = {constant.value!r}, correction = {constant.correction!r}, origin = {origin} }}"


def _text(text: str) -> str:
    """A TOML basic string; JSON's escapes are among those of TOML."""
    return json.dumps(text, ensure_ascii=False)

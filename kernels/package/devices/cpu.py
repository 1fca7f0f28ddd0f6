"""CPUs: a C++ program for each instruction set that ``--isa`` names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexspec.compiler.artifact import layout
from flexspec.kernels.package.devices.registry import DevicePackage, PackageInputs, Packager

if TYPE_CHECKING:
    from flexspec.kernels.package.options import CompileOptions


def _open(inputs: PackageInputs) -> DevicePackage:
    from flexspec.kernels.package.cpu import CpuPackage

    return CpuPackage(inputs)


def _targets(options: CompileOptions) -> Sequence[str]:
    from flexspec.kernels.cpu.build import target_isas

    return [layout.cpu_target(isa) for isa in (target_isas() if options.isas is None else options.isas)]


PACKAGER = Packager(_open, other_targets=_targets)

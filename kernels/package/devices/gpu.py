"""GPUs: Triton kernels for each architecture that ``--target`` names."""

from __future__ import annotations

from flexspec.kernels.gpu.targets import TARGETS
from flexspec.kernels.package.devices.registry import DevicePackage, PackageInputs, Packager


def _open(inputs: PackageInputs) -> DevicePackage:
    from flexspec.kernels.package.gpu import GpuPackage

    return GpuPackage(inputs)


PACKAGER = Packager(_open, targets=tuple(TARGETS))

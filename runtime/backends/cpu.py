"""The CPU: the C++ programs that were generated for the models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexspec.runtime.backends.registry import Backend, DeviceKernels, Needs

if TYPE_CHECKING:
    from flexspec.compiler.artifact.opened import OpenedArtifact


def _open(artifact: OpenedArtifact, needs: Needs) -> DeviceKernels:
    from flexspec.runtime.backends.programs import CpuPrograms

    return CpuPrograms.of(artifact, needs)


BACKEND = Backend("cpu", _open, process_group="gloo", in_host_memory=True)

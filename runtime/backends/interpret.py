"""No device: the artifact's GPU kernels in Triton's interpreter on the CPU, slow, for checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexspec.runtime.backends.registry import Backend, DeviceKernels, Needs, without_torch

if TYPE_CHECKING:
    from flexspec.compiler.artifact.opened import OpenedArtifact


def _open(artifact: OpenedArtifact, needs: Needs) -> DeviceKernels:
    try:
        from flexspec.runtime.backends.triton import open_interpreter
    except ImportError as error:
        raise without_torch("interpret", error) from None
    return open_interpreter(artifact, needs)


BACKEND = Backend(
    "interpret",
    _open,
    process_group="gloo",
    in_host_memory=False,
    times_itself=False,
    environment={"TRITON_INTERPRET": "1"},  # Triton reads it when it is first imported, which is later
    help="GPU kernels in Triton's interpreter, slow, for checks",
)

"""GPUs that torch calls cuda, AMD's among them: the artifact's Triton kernels, everything else by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexspec.runtime.backends.registry import Backend, DeviceKernels, Needs, without_torch

if TYPE_CHECKING:
    from flexspec.compiler.artifact.opened import OpenedArtifact


def _open(artifact: OpenedArtifact, needs: Needs) -> DeviceKernels:
    try:
        from flexspec.runtime.backends.triton import open_gpu
    except ImportError as error:
        raise without_torch("cuda", error) from None
    return open_gpu(artifact, needs)


BACKEND = Backend("cuda", _open, process_group="nccl", in_host_memory=False)

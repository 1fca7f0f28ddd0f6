"""An artifact's Triton kernels on a GPU, or in Triton's interpreter: which are used, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.model_record import GpuRecord
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.errors import ArtifactError, CapacityError, ToolchainError
from flexspec.graph import Graph
from flexspec.kernels.gpu.aot import CompiledVariant
from flexspec.kernels.gpu.family import Variant, kernel_variants
from flexspec.kernels.gpu.package import read_packaged
from flexspec.kernels.gpu.targets import TARGETS
from flexspec.runtime.backends.registry import Needs
from flexspec.runtime.distributed.processes import this_rank
from flexspec.runtime.distributed.shards import TritonShard
from flexspec.runtime.executors.room import Room
from flexspec.runtime.executors.triton import TritonExecutor
from flexspec.runtime.executors.triton_device import GPU, INTERPRETER, TritonDevice, gpu_architecture

_PLAIN_TARGET = "sm_90"  # for the interpreter of an artifact without GPU kernels, whose error names it


@dataclass(frozen=True, slots=True)
class TritonKernels:
    """The kernels of one architecture, ``target``."""

    artifact: OpenedArtifact
    record: GpuRecord
    target: str
    device: TritonDevice
    name: str

    def executor(self, model: str, room: Room) -> TritonExecutor:
        """One model with its own pool on the device.

        Raises ArtifactError for parts that are missing or do not belong together, CapacityError when the device's
        memory is too small, ToolchainError where the kernels cannot run.
        """
        graph = self.artifact.graph(model)
        with _memory_for(model):
            return TritonExecutor(
                graph, self.artifact.canonical_weights(model), room.pages, room.max_rows, self.device,
                compiled=self._kernels(graph), max_tree_tokens=self.record.max_tree_tokens,
            )  # fmt: skip

    def shard(self, rank: int, room: Room) -> TritonShard:
        """One rank's part of the LLM. Raises as ``executor``."""
        name = layout.rank_name(rank)
        graph = self.artifact.graph(name)
        with _memory_for(name):
            return TritonShard(
                graph, self.artifact.canonical_weights(name), pages=room.pages, max_rows=room.max_rows,
                device=self.device, compiled=self._kernels(graph), max_tree_tokens=self.record.max_tree_tokens,
            )  # fmt: skip

    def _kernels(self, graph: Graph) -> dict[Variant, CompiledVariant]:
        variants = kernel_variants(graph, self.record.max_tree_tokens).values()
        return {
            variant: read_packaged(variant, self.target, self.artifact.files.read_bytes)
            for variant in dict.fromkeys(variants)
        }


@contextmanager
def _memory_for(name: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"no device memory for {name} ({str(error).partition('.')[0]})", "room for weights and KV pool",
            "lower --kv-tokens, or use a GPU with more memory",
        ) from None  # fmt: skip


def open_gpu(artifact: OpenedArtifact, needs: Needs) -> TritonKernels:
    """The kernels for this host's GPU; with several GPUs, for the one with this rank's number on its host.

    Raises ToolchainError without one, and as ``_for_target``.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(this_rank().local_rank % torch.cuda.device_count())
    target = gpu_architecture()
    return TritonKernels(artifact, _for_target(artifact, target, needs), target, GPU, target)


def open_interpreter(artifact: OpenedArtifact, needs: Needs) -> TritonKernels:
    """The source of any kernels that the artifact has. Raises as ``_for_target``."""
    target = next(iter(_built(artifact)), _PLAIN_TARGET)
    return TritonKernels(artifact, _for_target(artifact, target, needs), target, INTERPRETER, f"interpreted {target}")


def _built(artifact: OpenedArtifact) -> list[str]:
    return [target for target in artifact.manifest.targets if target in TARGETS]


def _for_target(artifact: OpenedArtifact, target: str, needs: Needs) -> GpuRecord:
    """What executors need besides kernels, if there are kernels.

    Raises ToolchainError for an unknown architecture, ArtifactError naming the command that rebuilds the artifact when
    it has no kernels for it, CapacityError for trees larger than they take.
    """
    if target not in TARGETS:
        raise ToolchainError(
            f"a GPU of architecture {target}", f"one of {', '.join(TARGETS)}", "run it with --device cpu"
        )
    built, gpu = _built(artifact), artifact.record.gpu
    if target not in built or gpu is None:
        raise _not_built(artifact, target, built)
    if needs.tree_rows > gpu.max_tree_tokens:
        raise CapacityError(
            f"token trees of {needs.tree_rows} nodes with the root",
            f"at most {gpu.max_tree_tokens} in these GPU kernels",
            f"choose a smaller --draft, or rebuild it: {artifact.manifest.rebuild} --max-tree {needs.tree_rows}",
        )
    return gpu


def _not_built(artifact: OpenedArtifact, target: str, built: Sequence[str]) -> ArtifactError:
    option = "" if target in built else f" --target {target}"
    content = "GPU kernels without weights" if target in built else ", ".join(artifact.manifest.targets) or "no target"
    return ArtifactError(
        f"{artifact.name} holds {content}", f"kernels and weights for {target}",
        f"{artifact.fix}{option}",
    )  # fmt: skip

"""Executors for a GPU from an artifact: which of its kernels a device gets, and what is refused.

Owns the way from ``--device`` to TritonExecutors. ``interpret`` runs the generated source of the artifact in Triton's
interpreter on the CPU: slow, for checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flexspec.compiler.artifact.model_record import GpuRecord, PartRecord
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.errors import ArtifactError, CapacityError, ToolchainError
from flexspec.graph import Graph
from flexspec.kernels.gpu.aot import CompiledVariant
from flexspec.kernels.gpu.family import Variant, kernel_variants
from flexspec.kernels.gpu.package import read_packaged
from flexspec.kernels.gpu.targets import TARGETS
from flexspec.runtime.distributed.processes import this_rank
from flexspec.runtime.distributed.shards import TritonShard
from flexspec.runtime.executors.triton import TritonExecutor, gpu_architecture

TORCH_DEVICES = {"cuda": "cuda", "interpret": "cpu"}


@dataclass(frozen=True, slots=True)
class GpuModels:
    """An artifact as one device runs it. ``target`` is the architecture whose kernels are taken."""

    artifact: OpenedArtifact
    record: GpuRecord
    device: str
    target: str

    @property
    def name(self) -> str:
        return self.target if self.device == "cuda" else f"interpreted {self.target}"

    def executor(self, part: PartRecord, pages: int, max_rows: int) -> TritonExecutor:
        """One model with its own pool on the device.

        Raises ArtifactError for parts that are missing or do not belong together, CapacityError when the device's
        memory is too small, ToolchainError where the kernels cannot run.
        """
        graph = self.artifact.graph(part.name)
        with _memory_for(part.name):
            return TritonExecutor(
                graph, self.artifact.canonical_weights(part.name), pages, max_rows, TORCH_DEVICES[self.device],
                compiled=self._kernels(graph), max_tree_tokens=self.record.max_tree_tokens,
            )  # fmt: skip

    def shard(self, name: str, pages: int, max_rows: int) -> TritonShard:
        """One rank's part of the LLM, as ``name`` in the artifact. Raises as ``executor``."""
        graph = self.artifact.graph(name)
        weights = self.artifact.canonical_weights(name)
        with _memory_for(name):
            return TritonShard(
                graph, weights, pages=pages, max_rows=max_rows, device=TORCH_DEVICES[self.device],
                compiled=self._kernels(graph), max_tree_tokens=self.record.max_tree_tokens,
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


def open_gpu(artifact: OpenedArtifact, device: str, tree_rows: int) -> GpuModels:
    """Choose kernels for ``device``; ``tree_rows`` is the largest token tree of the draft plan, the root counted.

    Raises ToolchainError without such a device, ArtifactError naming the command that rebuilds the artifact when it has
    no kernels for it, CapacityError for trees larger than the kernels take.
    """
    if device not in TORCH_DEVICES:
        raise ToolchainError(f"device {device!r}", "cpu, cuda or interpret", "name one of them")
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(this_rank().local_rank % torch.cuda.device_count())
    built = [target for target in artifact.manifest.targets if target in TARGETS]
    target = gpu_architecture() if device == "cuda" else next(iter(built), "sm_90")
    if target not in TARGETS:
        raise ToolchainError(
            f"a GPU of architecture {target}", f"one of {', '.join(TARGETS)}", "run it with --device cpu"
        )
    gpu = artifact.record.gpu
    if target not in built or gpu is None:
        raise _not_built(artifact, target, built)
    if tree_rows > gpu.max_tree_tokens:
        raise CapacityError(
            f"token trees of {tree_rows} nodes with the root", f"at most {gpu.max_tree_tokens} in these GPU kernels",
            f"choose a smaller --draft, or rebuild it: {artifact.manifest.rebuild} --max-tree {tree_rows}",
        )  # fmt: skip
    return GpuModels(artifact, gpu, device, target)


def _not_built(artifact: OpenedArtifact, target: str, built: Sequence[str]) -> ArtifactError:
    option = "" if target in built else f" --target {target}"
    found = "GPU kernels without weights" if target in built else ", ".join(artifact.manifest.targets) or "no target"
    return ArtifactError(
        f"{artifact.name} holds {found}", f"kernels and weights for {target}",
        f"{artifact.fix}{option}",
    )  # fmt: skip

"""From an opened artifact to executors: which of its programs a device gets, checked against what it says of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.model_record import PartRecord
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.draft_plan import DraftLadder
from flexspec.errors import ArtifactError, ToolchainError
from flexspec.host import usable_cores
from flexspec.kernels.cpu.build import supported_isas
from flexspec.kernels.cpu.check import seeded_digest
from flexspec.kernels.cpu.exchange import split_logits
from flexspec.runtime.distributed.processes import this_rank
from flexspec.runtime.executors.cpu import CpuExecutor
from flexspec.runtime.executors.cpu_rank import CpuRank
from flexspec.runtime.executors.step import Executor
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.step_sizes import step_sizes

if TYPE_CHECKING:
    from flexspec.runtime.open.gpu import GpuModels


def open_backend(
    artifact: OpenedArtifact, ladder: DraftLadder, options: ServeOptions
) -> tuple[str, Callable[[PartRecord, ServeOptions], Executor]]:
    """What the kernels run on, and the maker of a model's executor there."""
    if options.device == "cpu":
        isa = choose_isa(artifact)
        return isa, lambda part, sized: open_cpu(artifact, isa, part, sized)
    gpu = gpu_models(artifact, ladder, options)
    return gpu.name, lambda part, sized: gpu.executor(part, sized.pages, max(sized.max_rows, sized.max_requests))


def gpu_models(artifact: OpenedArtifact, ladder: DraftLadder, options: ServeOptions) -> GpuModels:
    """The artifact on a GPU. Raises as open/gpu.py: open_gpu, and ToolchainError without PyTorch."""
    try:
        from flexspec.runtime.open.gpu import open_gpu
    except ImportError as error:
        raise ToolchainError(
            f"--device {options.device} without PyTorch ({error})", "torch >= 2.11",
            "pip install torch, or run it with --device cpu",
        ) from None  # fmt: skip
    worst = ladder.worst
    return open_gpu(artifact, options.device, max(worst.max_nodes + 1, worst.ssm_rows))


def choose_isa(artifact: OpenedArtifact) -> str:
    """The best instruction set that both the artifact and this CPU have."""
    here = supported_isas()
    for isa in here:
        if layout.cpu_target(isa) in artifact.manifest.targets:
            return isa
    raise ArtifactError(
        f"{artifact.name} was built for {', '.join(artifact.manifest.targets)}",
        f"kernels for {layout.cpu_target(here[0])}",
        f"rebuild it on, or for, that machine: {artifact.manifest.rebuild.replace(' --isa none', '')}",
    )


def open_cpu(artifact: OpenedArtifact, isa: str, part: PartRecord, options: ServeOptions) -> CpuExecutor:
    """A model on the CPU. Raises ArtifactError for a program that is not the one that was compiled, CapacityError."""
    library, weights = _program(artifact, isa, part.name, options)
    executor = CpuExecutor(
        library,
        weights,
        pages=options.pages,
        max_rows=max(options.max_rows, options.max_requests),  # every request needs one
        threads=options.threads or default_threads(),
    )
    _check_sizes(artifact, part.name, executor)
    return executor


def open_cpu_rank(artifact: OpenedArtifact, isa: str, rank: int, options: ServeOptions) -> CpuRank:
    """A rank's part of the LLM on the CPU. Raises as ``open_cpu``."""
    name = layout.rank_name(rank)
    library, weights = _program(artifact, isa, name, options)
    program = CpuRank.built(
        rank,
        artifact.graph(name),
        library,
        weights,
        pages=options.pages,
        max_rows=max(options.max_rows, options.max_requests),
        threads=options.threads or default_threads(),
    )
    _check_sizes(artifact, name, program)
    return program


def _check_sizes(artifact: OpenedArtifact, name: str, program: CpuExecutor | CpuRank) -> None:
    """The program's own sizes, which its memory is laid out by, are those of the graph that the artifact says it is."""
    sizes = step_sizes(split_logits(artifact.graph(name))[0])
    if not program.facts.agrees_with(sizes):
        program.close()
        raise ArtifactError(f"the program of {name} has {program.facts}", f"{sizes}, as its graph", artifact.fix)


def _program(
    artifact: OpenedArtifact, isa: str, name: str, options: ServeOptions
) -> tuple[Path, Sequence[NDArray[Any]]]:
    """A program and its weights, self-tested."""
    library, weights = artifact.library(name, isa), artifact.packed_weights(name)
    if options.checks:
        _self_test(artifact, isa, name, library, weights)
    return library, weights


def default_threads() -> int:
    """One thread a core this process may run on, at most 8: a step is bound by memory, not by arithmetic.

    Ranks on one host share its cores.
    """
    return max(1, min(8, usable_cores() // max(1, this_rank().local_ranks)))


def _self_test(artifact: OpenedArtifact, isa: str, name: str, library: Path, weights: Sequence[NDArray[Any]]) -> None:
    expected = artifact.digest(name, isa)
    if expected is None:  # compiled on a machine that could not run this instruction set
        return
    found = seeded_digest(library, weights, artifact.graph(name))
    if found != expected:
        raise ArtifactError(
            f"{name} on {isa} computes other values ({found[:12]}) than at compile time ({expected!s:.12})",
            "the same bytes",
            f"{artifact.fix}; if it persists set FLEXSPEC_CPU_ISA=avx512 or avx2",
        )

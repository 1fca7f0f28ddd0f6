"""An artifact's generated C++ programs on this CPU, each checked against the artifact's record of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.errors import ArtifactError
from flexspec.host.cores import usable_cores
from flexspec.kernels.cpu.build import supported_isas
from flexspec.kernels.cpu.check import seeded_digest
from flexspec.kernels.cpu.exchange import split_logits
from flexspec.runtime.backends.registry import Needs
from flexspec.runtime.distributed.processes import this_rank
from flexspec.runtime.executors.cpu import CpuExecutor
from flexspec.runtime.executors.cpu_rank import CpuRank
from flexspec.runtime.executors.room import Room
from flexspec.step_sizes import step_sizes

if TYPE_CHECKING:
    from flexspec.runtime.distributed.shards import CpuShard


@dataclass(frozen=True, slots=True)
class CpuPrograms:
    """The programs for one instruction set."""

    artifact: OpenedArtifact
    isa: str
    threads: int
    checks: bool

    @classmethod
    def of(cls, artifact: OpenedArtifact, needs: Needs) -> CpuPrograms:
        """Those of the best instruction set that both the artifact and this CPU have. Raises ArtifactError."""
        return cls(artifact, _choose_isa(artifact), needs.threads or default_threads(), needs.checks)

    @property
    def name(self) -> str:
        return self.isa

    def executor(self, model: str, room: Room) -> CpuExecutor:
        """A whole model. Raises ArtifactError for a program other than the compiled one, CapacityError."""
        library, weights = self._program(model)
        with self._rebuildable():
            executor = CpuExecutor(library, weights, pages=room.pages, max_rows=room.max_rows, threads=self.threads)
        self._check_sizes(model, executor)
        return executor

    def rank(self, rank: int, room: Room) -> CpuRank:
        """A rank's part of the LLM. Raises as ``executor``."""
        name = layout.rank_name(rank)
        library, weights = self._program(name)
        with self._rebuildable():
            program = CpuRank.built(
                rank, self.artifact.graph(name), library, weights,
                pages=room.pages, max_rows=room.max_rows, threads=self.threads,
            )  # fmt: skip
        self._check_sizes(name, program)
        return program

    def shard(self, rank: int, room: Room) -> CpuShard:
        """``rank``, ready to join the others. Raises as ``executor``."""
        from flexspec.runtime.distributed.shards import CpuShard

        return CpuShard(self.rank(rank, room))

    def _program(self, name: str) -> tuple[Path, Sequence[NDArray[Any]]]:
        """A program and its weights, self-tested."""
        library, weights = self.artifact.library(name, self.isa), self.artifact.packed_weights(name)
        expected = self.artifact.digest(name, self.isa) if self.checks else None
        if expected is None:  # or compiled on a machine that could not run this instruction set
            return library, weights
        with self._rebuildable():
            digest = seeded_digest(library, weights, self.artifact.graph(name))
        if digest != expected:
            raise ArtifactError(
                f"{name} on {self.isa} computes other values ({digest[:12]}) than at compile time ({expected:.12})",
                "the same bytes",
                f"{self.artifact.fix}; if it persists set FLEXSPEC_CPU_ISA=avx512 or avx2",
            )
        return library, weights

    @contextmanager
    def _rebuildable(self) -> Iterator[None]:
        """The error of a program that does not load, such as an earlier version's, names the command to rebuild."""
        try:
            yield
        except ArtifactError as error:
            raise ArtifactError(error.found, error.expected, self.artifact.fix) from None

    def _check_sizes(self, name: str, program: CpuExecutor | CpuRank) -> None:
        """Check that the program's own sizes, which set its memory layout, are those of its graph in the artifact."""
        sizes = step_sizes(split_logits(self.artifact.graph(name))[0])
        if not program.facts.agrees_with(sizes):
            program.close()
            raise ArtifactError(
                f"the program of {name} has {program.facts}", f"{sizes}, as its graph", self.artifact.fix
            )


def default_threads() -> int:
    """One thread per core this process may run on, at most 8: a step is memory-bound.

    Ranks on one host share its cores.
    """
    return max(1, min(8, usable_cores() // max(1, this_rank().local_ranks)))


def _choose_isa(artifact: OpenedArtifact) -> str:
    supported = supported_isas()
    for isa in supported:
        if layout.cpu_target(isa) in artifact.manifest.targets:
            return isa
    raise ArtifactError(
        f"{artifact.name} was built for {', '.join(artifact.manifest.targets)}",
        f"kernels for {layout.cpu_target(supported[0])}",
        f"rebuild it on, or for, that machine: {artifact.manifest.rebuild.replace(' --isa none', '')}",
    )

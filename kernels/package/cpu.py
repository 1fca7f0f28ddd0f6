"""What an artifact stores of a CPU program: source, a library for each instruction set, digests of its self-test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.graph import Graph
from flexspec.kernels.cpu.build import build_path, supported_isas
from flexspec.kernels.cpu.check import seeded_digest
from flexspec.kernels.cpu.render import CpuProgram


def add_program(
    writer: ArtifactWriter,
    name: str,
    program: CpuProgram,
    graph: Graph,
    arrays: Sequence[NDArray[np.generic]],
    isas: Sequence[str],
) -> dict[str, str]:
    """Build and store a program; returns the digests of its self-test for those of ``isas`` that run here.

    ``arrays`` are the packed weights of the program's table, in order. Raises ToolchainError without a compiler,
    CompileError in the compiler's words.
    """
    writer.add_bytes(layout.cpu_source(name), program.source.encode())
    digests = {}
    for isa in isas:
        library = build_path(program.source, isa)
        writer.add_file(layout.cpu_library(name, isa), library)
        if isa in supported_isas():
            digests[isa] = seeded_digest(library, arrays, graph)
    return digests

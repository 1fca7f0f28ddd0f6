"""What an artifact stores for CPUs: each program's source, a library for each instruction set, weights in its tiles.

The same for a whole model and for a rank's part of one. Owns the digests of the self-tests, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.graph import Graph
from flexspec.kernels.cpu.build import build_path, header_files, supported_isas
from flexspec.kernels.cpu.check import seeded_digest
from flexspec.kernels.cpu.exchange import split_logits
from flexspec.kernels.cpu.pack import GetWeight, pack
from flexspec.kernels.cpu.render import render
from flexspec.kernels.package.weight_store import Place, WeightStore


@dataclass(slots=True)
class CpuPackage:
    """The CPU's share of an artifact, for the instruction sets ``isas``; nothing at all where there are none."""

    writer: ArtifactWriter
    isas: Sequence[str]
    digests: dict[str, dict[str, str]] = field(default_factory=dict)  # program -> instruction set that runs here

    def add(self, name: str, graph: Graph, get: GetWeight, weights: WeightStore) -> tuple[Place, ...]:
        """Store the program of a lowered graph; returns where the weights of its table lie.

        ``get(name)`` gives a weight in float32. Raises CompileError, ToolchainError without a compiler, WeightError.
        """
        if not self.isas:
            return ()
        program = render(split_logits(graph)[0])
        packed = {f"{i:03d}.{entry.kind}": pack(entry, get) for i, entry in enumerate(program.weights)}
        bf16 = [tensor for tensor, entry in zip(packed, program.weights, strict=True) if entry.is_bf16]
        places = weights.add(layout.packed_weights(name), packed, bf16=bf16)
        self.writer.add_bytes(layout.cpu_source(name), program.source.encode())
        self.digests[name] = {}
        for isa in self.isas:
            library = build_path(program.source, isa)
            self.writer.add_file(layout.cpu_library(name, isa), library)
            if isa in supported_isas():
                self.digests[name][isa] = seeded_digest(library, list(packed.values()), graph)
        return tuple(places[tensor] for tensor in packed)

    def add_headers(self) -> None:
        """Store the templates that the programs include."""
        for name, text in header_files().items() if self.isas else ():
            self.writer.add_bytes(layout.cpu_header(name), text)

"""What an artifact stores for CPUs: each program's source, a library for each instruction set, weights in its tiles.

The same for a whole model and for a rank's part of one. Owns the digests of the self-tests, too.
"""

from __future__ import annotations

import subprocess

from flexspec.compiler.artifact import layout
from flexspec.graph import Graph
from flexspec.kernels.cpu.build import build_path, find_compiler, header_files, supported_isas
from flexspec.kernels.cpu.check import seeded_digest
from flexspec.kernels.cpu.exchange import split_logits
from flexspec.kernels.cpu.pack import GetWeight, pack
from flexspec.kernels.cpu.render import render
from flexspec.kernels.package.devices.registry import PackageInputs
from flexspec.kernels.package.weight_store import WeightStore


class CpuPackage:
    """The CPU's share of an artifact (devices/registry.py: DevicePackage)."""

    def __init__(self, inputs: PackageInputs) -> None:
        self._writer, self._records = inputs.writer, inputs.records
        self._isas = [layout.isa_of(target) for target in inputs.targets]
        self._weights = WeightStore(inputs.writer)

    def add_model(self, name: str, graph: Graph, get: GetWeight) -> None:
        self._add(name, graph, get, self._weights)

    def add_rank(self, name: str, graph: Graph, get: GetWeight) -> None:
        self._add(name, graph, get, WeightStore(self._writer))

    def finish(self) -> None:
        """The templates that the programs include."""
        for name, text in header_files().items():
            self._writer.add_bytes(layout.cpu_header(name), text)
        compiler = find_compiler()
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        self._records.tools["c++"] = next(iter(version.splitlines()), compiler)

    def _add(self, name: str, graph: Graph, get: GetWeight, weights: WeightStore) -> None:
        """Store the program of a lowered graph. Raises CompileError, ToolchainError without a compiler, WeightError."""
        program = render(split_logits(graph)[0])
        packed = {f"{i:03d}.{entry.kind}": pack(entry, get) for i, entry in enumerate(program.weights)}
        bf16 = [tensor for tensor, entry in zip(packed, program.weights, strict=True) if entry.is_bf16]
        places = weights.add(layout.packed_weights(name), packed, bf16=bf16)
        self._records.weight_tables[name] = tuple(places[tensor] for tensor in packed)
        self._writer.add_bytes(layout.cpu_source(name), program.source.encode())
        digests = self._records.digests[name] = {}
        for isa in self._isas:
            library = build_path(program.source, isa)
            self._writer.add_file(layout.cpu_library(name, isa), library)
            if isa in supported_isas():
                digests[isa] = seeded_digest(library, list(packed.values()), graph)

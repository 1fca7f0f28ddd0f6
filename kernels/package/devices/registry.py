"""What compiling stores for each kind of device: a kind is one file of this folder with a ``PACKAGER``, found by its
presence.

The file says which targets there are and how an artifact's share for them is written; nothing else in compiling knows
which devices exist. It is imported for ``--help``, so heavy modules are imported when a share is opened.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from flexspec.errors import CompileError

if TYPE_CHECKING:
    from flexspec.compiler.artifact.model_record import GpuRecord
    from flexspec.compiler.artifact.write import ArtifactWriter
    from flexspec.graph import Graph
    from flexspec.kernels.cpu.pack import GetWeight
    from flexspec.kernels.gpu.package import ResourceRows
    from flexspec.kernels.package.options import CompileOptions
    from flexspec.kernels.package.weight_store import Place
    from flexspec.progress import Progress


class DevicePackage(Protocol):
    """One device's share of an artifact, as it is written. All methods raise CompileError, ToolchainError, WeightError.

    ``get(name)`` gives a weight in float32.
    """

    def add_model(self, name: str, graph: Graph, get: GetWeight) -> None:
        """A whole model, lowered. A weight may be a reference to that of an earlier model."""
        ...

    def add_rank(self, name: str, graph: Graph, get: GetWeight) -> None:
        """A rank's part of the LLM, lowered. It opens no other rank's weights."""
        ...

    def finish(self) -> None:
        """Store what all models and ranks share."""
        ...


@dataclass(slots=True)
class SharedRecords:
    """The device data of the artifact's common records; each share fills in what it has."""

    weight_tables: dict[str, tuple[Place, ...]] = field(default_factory=dict)  # of CPU programs, by graph's name
    digests: dict[str, dict[str, str]] = field(default_factory=dict)  # self-tests: graph's name -> target -> sha256
    gpu: GpuRecord | None = None
    tools: dict[str, str] = field(default_factory=dict)  # versions of the compilers
    resources: ResourceRows = field(default_factory=list)  # of kernels, for the user who compiles


@dataclass(frozen=True, slots=True)
class PackageInputs:
    """The arguments that open a share."""

    targets: Sequence[str]  # of this device, as the manifest names them; at least one
    options: CompileOptions
    writer: ArtifactWriter  # a device without members in layout.py writes ``layout.device_file``
    records: SharedRecords
    progress: Progress


@dataclass(frozen=True, slots=True)
class Packager:
    """A kind of device that artifacts are compiled for."""

    open: Callable[[PackageInputs], DevicePackage]
    targets: tuple[str, ...] = ()  # that --target takes
    # Targets that other options name, as the manifest calls them.
    other_targets: Callable[[CompileOptions], Sequence[str]] = lambda options: ()


def packagers() -> dict[str, Packager]:
    """Every packager by its file's name."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.name != "registry")
    return {name: importlib.import_module(f"{package.__name__}.{name}").PACKAGER for name in names}


def known_targets() -> list[str]:
    """What --target takes."""
    return [target for packager in packagers().values() for target in packager.targets]


def chosen_targets(options: CompileOptions) -> Mapping[str, Sequence[str]]:
    """The targets to compile for, by packager. Raises CompileError for an unknown name, and for no target at all."""
    known = known_targets()
    for target in options.targets:
        if target not in known:
            raise CompileError(f"target {target!r}", f"one of {', '.join(known)}", "name a known target")
    chosen = {
        name: (*packager.other_targets(options), *(target for target in options.targets if target in packager.targets))
        for name, packager in packagers().items()
    }
    if not any(chosen.values()):
        raise CompileError(
            "no CPU program and no GPU target: nothing could run the artifact",
            "--isa none together with --target",
            "name a GPU architecture (--target sm_90), or leave --isa out",
        )
    return {name: targets for name, targets in chosen.items() if targets}

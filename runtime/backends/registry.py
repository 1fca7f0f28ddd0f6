"""What models run on: a device is one file of this folder with a ``BACKEND``, files by its presence.

The file names the device as ``--device`` does and says how an artifact is opened there; nothing else in the runtime
tests which device it is. A file is imported for ``--help``, so heavy modules are imported when an artifact is opened.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from flexspec.errors import RequestError, ToolchainError

if TYPE_CHECKING:
    from flexspec.compiler.artifact.opened import OpenedArtifact
    from flexspec.runtime.distributed.shards import Shard
    from flexspec.runtime.executors.room import Room
    from flexspec.runtime.executors.step import Executor

DEFAULT_BACKEND = "cpu"
_NO_BACKEND = ("registry", "programs", "triton")  # files of this folder that declare none


class DeviceKernels(Protocol):
    """An artifact's kernels on a device. All methods raise ArtifactError, CapacityError or ToolchainError."""

    @property
    def name(self) -> str:
        """Instruction set or GPU architecture that they were built for."""
        ...

    def executor(self, model: str, room: Room) -> Executor:
        """A whole model with a pool of its own."""
        ...

    def shard(self, rank: int, room: Room) -> Shard:
        """A rank's part of the LLM with a pool of its own."""
        ...


@dataclass(frozen=True, slots=True)
class Needs:
    """What kernels are opened for."""

    tree_rows: int  # of the largest token tree that is verified or drafted, the root counted
    threads: int = 0  # of the CPU; 0: one per core, at most 8
    checks: bool = True  # run the self-tests


@dataclass(frozen=True, slots=True)
class Backend:
    """A device that models run on."""

    name: str  # as --device and ServeOptions.device name it
    # Chooses the artifact's kernels for the device that is there. Raises ToolchainError without one, ArtifactError,
    # naming the command that adds them, when the artifact has none for it, CapacityError for trees too large for them.
    open: Callable[[OpenedArtifact, Needs], DeviceKernels]
    process_group: str  # torch.distributed backend that carries rows between ranks
    in_host_memory: bool  # weights and pools are in this host's memory, which is checked at startup (open/capacity.py)
    times_itself: bool = True  # its steps are worth timing at startup, for the tree budget
    environment: Mapping[str, str] = field(default_factory=dict)  # set before any library is imported
    help: str = ""  # for --help, where the name is not enough


def backends() -> dict[str, Backend]:
    """Every backend by name."""
    folder = importlib.import_module(__name__.rpartition(".")[0]).__path__
    files = sorted(module.name for module in pkgutil.iter_modules(folder) if module.name not in _NO_BACKEND)
    modules = [importlib.import_module(f"{__name__.rpartition('.')[0]}.{name}") for name in files]
    return {module.BACKEND.name: module.BACKEND for module in modules}


def backend_of(device: str) -> Backend:
    """The backend of a ServeOptions.device. Raises RequestError for an unknown one."""
    known = backends()
    if device not in known:
        raise RequestError(f"device={device!r}", f"one of {', '.join(known)}", "choose one of them")
    return known[device]


def without_torch(device: str, error: ImportError) -> ToolchainError:
    """The error of a device whose libraries are not installed."""
    return ToolchainError(
        f"--device {device} without PyTorch ({error})", "torch >= 2.11",
        "pip install torch, or run it with --device cpu",
    )  # fmt: skip

"""What all parts of an engine are opened from: the artifact, its draft plans, the options, the device's kernels."""

from __future__ import annotations

from dataclasses import dataclass

from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.draft_plan import DraftLadder
from flexspec.runtime.backends.registry import Backend, DeviceKernels, Needs, backend_of
from flexspec.runtime.open.drafters import choose_ladder
from flexspec.runtime.open.serve_options import ServeOptions


@dataclass(frozen=True, slots=True)
class Opening:
    """An artifact about to run in this process, alone or as one rank."""

    artifact: OpenedArtifact
    options: ServeOptions
    ladder: DraftLadder  # the draft plan of every batch size, from the option or the artifact
    backend: Backend
    kernels: DeviceKernels

    @classmethod
    def of(cls, artifact: OpenedArtifact, options: ServeOptions) -> Opening:
        """Choose draft plans and kernels.

        Raises RequestError for a bad draft plan or an unknown device, ArtifactError for what the artifact lacks,
        CapacityError, ToolchainError for a device that is missing.
        """
        ladder, backend = choose_ladder(options.draft, artifact), backend_of(options.device)
        tree_rows = max(ladder.worst.max_nodes + 1, ladder.worst.ssm_rows)
        kernels = backend.open(artifact, Needs(tree_rows, options.threads, options.checks))
        return cls(artifact, options, ladder, backend, kernels)

"""The GPU architectures that kernels are compiled for, and what they allow. Plain data: no Triton, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from flexspec.errors import CompileError


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU architecture that binaries are compiled for."""

    name: str
    backend: str  # Triton's: cuda or hip
    arch: int | str
    warp_size: int
    shared_limit_bytes: int  # what one block may use


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 * 1024),
        Target("sm_86", "cuda", 86, 32, 99 * 1024),
        Target("sm_89", "cuda", 89, 32, 99 * 1024),
        Target("sm_90", "cuda", 90, 32, 227 * 1024),
        Target("sm_100", "cuda", 100, 32, 227 * 1024),
        Target("gfx942", "hip", "gfx942", 64, 64 * 1024),
    )
}


def target_of(name: str) -> Target:
    """The target of that name. Raises CompileError listing the known ones."""
    if name not in TARGETS:
        raise CompileError(f"target {name!r}", f"one of {', '.join(TARGETS)}", "name a known target")
    return TARGETS[name]

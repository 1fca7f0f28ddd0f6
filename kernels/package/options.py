"""What the user of ``flexspec compile`` may choose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexspec.compiler.artifact.plan import Plan
from flexspec.draft_plan import DraftPlan
from flexspec.types import DType, WeightFormat


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """All of it; what may be named as a target is in devices/registry.py."""

    dtype: DType = DType.BF16
    targets: tuple[str, ...] = ()  # --target: sm_80, gfx942...
    isas: tuple[str, ...] | None = None  # CPU instruction sets; None: all of this machine's kind; (): no CPU program
    draft: DraftPlan = DraftPlan("off")
    max_tree_tokens: int = 64  # of the GPU kernels
    dump_ir: Path | None = None
    plan: Plan | None = None  # of several ranks; None is one rank
    weights: WeightFormat | None = None  # how weight matrices are stored; None: as numbers of ``dtype``

"""``flexspec.compile``: a model and its SSMs to an artifact; on the command line, ``flexspec compile``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexspec.api.arguments import AnyPath, AnyPaths, listed, read_dtype, read_weights
from flexspec.api.plan import FoundPlan
from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.plan import Plan
from flexspec.compiler.planner.plan_file import read_plan
from flexspec.draft_plan import DraftLadder, DraftPlan, default_draft
from flexspec.errors import CompileError
from flexspec.host.causes import typed_errors
from flexspec.kernels.cpu.build import ISA_FLAGS
from flexspec.kernels.package.compile_model import compile_model
from flexspec.kernels.package.options import CompileOptions
from flexspec.progress import Progress
from flexspec.types import DType

MAX_TREE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class CompiledArtifact(os.PathLike[str]):
    """A written artifact; pass it, or its path, to ``LLM``."""

    path: Path
    draft: DraftPlan  # what it drafts with by default
    gpu_kernels: tuple[dict[str, Any], ...] = ()  # registers, spills and shared memory of each, by target

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def __fspath__(self) -> str:
        return str(self.path)


@typed_errors()
def compile(
    model: AnyPath,
    *,
    out: AnyPath,
    ssm: AnyPaths = (),
    plan: FoundPlan | Plan | AnyPath | None = None,
    dtype: str | DType = DType.BF16,
    weights: str | None = None,
    targets: str | Sequence[str] = (),
    isas: str | Sequence[str] | None = None,
    draft: str | None = None,
    max_tree: int = 64,
    dump_ir: AnyPath | None = None,
    command: Sequence[str] = (),
    progress: Progress = lambda what, done, of: None,
) -> CompiledArtifact:
    """Compile ``model`` (a .gguf file or a Hugging Face folder) with its SSMs and write the artifact ``out``.

    ``plan``: one with several ranks, from ``flexspec.plan`` or a file. ``dtype``: of activations and KV cache, bf16 or
    f32. ``weights``: the format in which matrices are stored (f16, ...; default: ``dtype``). ``targets``: GPUs for
    which to compile kernels too (sm_90, gfx942, ...). ``isas``: CPU instruction sets (default: all of this machine's
    architecture), "none" for an artifact of ``targets`` alone. ``draft``: the draft plan that the artifact stores
    instead of the plan's or the default. ``max_tree``: largest token tree of the GPU kernels. ``dump_ir``: a folder for
    the graph after every pass. ``command``: the command that the artifact records for rebuilding it.

    Raises the loaders' errors (ModelFileError, ModelConfigError, WeightError, TokenizerError), CompileError for options
    that do not exist, ToolchainError without a C++ compiler, PlanError, and RequestError for a bad draft plan.
    """
    if not 1 <= max_tree <= MAX_TREE_TOKENS:
        raise CompileError(f"--max-tree {max_tree}", f"1 to {MAX_TREE_TOKENS} nodes", "choose a size in that range")
    ssms = listed(ssm)
    drafts = DraftPlan.parse(draft) if draft else default_draft(len(ssms))
    ranks = plan.plan if isinstance(plan, FoundPlan) else plan
    if ranks is not None and not isinstance(ranks, Plan):
        ranks = read_plan(Path(ranks), len(ssms), drafts)
    if ranks is not None and draft:
        ranks = replace(ranks, ladder=DraftLadder.of(drafts), micro_batches=())
    elif ranks is not None:
        drafts = ranks.ladder.for_batch(1)
    options = CompileOptions(
        dtype=read_dtype(dtype),
        targets=_names(targets),
        isas=_isas(isas),
        draft=drafts,
        max_tree_tokens=max_tree,
        dump_ir=None if dump_ir is None else Path(dump_ir),
        plan=ranks,
        weights=read_weights(weights),
    )
    words = command or _command(model, ssms, out, plan, options, draft)
    path, rows = compile_model(Path(model), ssms, Path(out), options, argv=words, progress=progress)
    return CompiledArtifact(path, drafts, tuple(rows))


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _isas(asked: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Instruction sets for CompileOptions. Raises CompileError for an unknown name."""
    if asked is None:
        return None
    names = _names(asked)
    if names in ((), ("none",)):
        return ()
    unknown = [name for name in names if name not in ISA_FLAGS]
    if unknown:
        known = f"one of {', '.join(ISA_FLAGS)}, or none alone"
        raise CompileError(f"--isa {unknown[0]}", known, "correct the name")
    return names


def _command(
    model: AnyPath, ssms: Sequence[Path], out: AnyPath, plan: object, options: CompileOptions, draft: str | None
) -> list[str]:
    """The equivalent ``flexspec compile`` command. A plan without a file gets the name that it has in the artifact."""
    words = ["flexspec", "compile", os.fspath(model), "-o", os.fspath(out), "--dtype", options.dtype.value]
    words += ["--weights", options.weights.name] if options.weights else []
    for ssm in ssms:
        words += ["--ssm", str(ssm)]
    if plan is not None:
        words += ["--plan", os.fspath(plan) if isinstance(plan, str | os.PathLike) else layout.PLAN]
    isas = ("none",) if options.isas == () else options.isas
    for flag, names in (("--target", options.targets), ("--isa", isas)):
        words += [flag, ",".join(names)] if names else []
    words += ["--draft", draft] if draft else []
    return [*words, "--max-tree", str(options.max_tree_tokens)]

"""From a checkpoint and its SSMs to an artifact: graph, passes, generated code, packed weights, self-tests, plan.

Owns the order of these steps. What each part is called is in compiler/artifact/layout.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.model_record import GpuRecord
from flexspec.compiler.artifact.plan import Plan, single_rank
from flexspec.compiler.artifact.tensor_file import map_tensors
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.compiler.frontends.loaded_model import LoadedModel
from flexspec.compiler.frontends.open_model import open_model
from flexspec.compiler.planner.plan_file import check_runnable
from flexspec.draft_plan import DraftPlan
from flexspec.drafters.record import DraftTable, drafter_records
from flexspec.errors import CompileError, TokenizerError
from flexspec.graph import Graph
from flexspec.kernels.cpu.build import find_compiler, target_isas
from flexspec.kernels.gpu.targets import target_of
from flexspec.kernels.package.cpu import CpuPackage
from flexspec.kernels.package.pairing import check_pairing
from flexspec.kernels.package.parts import ModelPart, build_parts
from flexspec.kernels.package.ranks import add_ranks
from flexspec.kernels.package.record import model_record
from flexspec.kernels.package.weight_store import WeightStore
from flexspec.progress import Progress
from flexspec.text import print_graph
from flexspec.types import DType, WeightFormat


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What the user may choose."""

    dtype: DType = DType.BF16
    gpu_targets: tuple[str, ...] = ()  # sm_80, gfx942...
    isas: tuple[str, ...] | None = None  # CPU instruction sets; None: all of this machine's kind; (): no CPU program
    draft: DraftPlan = DraftPlan("off")
    max_tree_tokens: int = 64
    dump_ir: Path | None = None
    plan: Plan | None = None  # of several ranks; None is one rank
    weights: WeightFormat | None = None  # how weight matrices are stored; None: as numbers of ``dtype``

    @property
    def cpu_isas(self) -> tuple[str, ...]:
        return target_isas() if self.isas is None else self.isas

    @property
    def targets(self) -> list[str]:
        """As the manifest names them."""
        return [*map(layout.cpu_target, self.cpu_isas), *self.gpu_targets]


def compile_model(
    llm_path: Path,
    ssm_paths: Sequence[Path],
    out: Path,
    options: CompileOptions,
    *,
    argv: Sequence[str],
    progress: Progress = lambda what, done, of: None,
) -> tuple[Path, list[dict[str, Any]]]:
    """Compile and write ``out``; returns its path and the GPU resource table (empty without GPU targets).

    A C++ compiler is needed for CPU programs only. Raises the loaders' errors, CompileError, ToolchainError,
    TokenizerError.
    """
    _check_targets(options)
    progress("reading the model files", 0, 1)
    llm = open_model(llm_path)
    ssms = [open_model(path) for path in ssm_paths]
    check_pairing(llm, ssms)
    if llm.tokenizer_json is None:
        expected = f"{layout.TOKENIZER} or GGUF tokenizer data"
        raise TokenizerError(f"{llm_path} has no tokenizer", expected, "add the file")
    plan = options.plan or single_rank(llm.config.layers, len(ssms), options.draft)
    if options.plan is not None:
        check_runnable(plan, llm.config.layers, len(ssms))
    parts = build_parts(llm, llm_path, ssms, ssm_paths, options.dtype, options.weights, options.dump_ir)
    with ArtifactWriter(out) as writer:
        cpu, weights, packed = CpuPackage(writer, options.cpu_isas), WeightStore(writer), {}
        for done, part in enumerate(parts):
            progress("compiling programs and packing weights", done, len(parts))
            packed[part.name] = cpu.add(part.name, part.lowered, part.get, weights)
        progress("compiling programs and packing weights", len(parts), len(parts))
        ranks: list[Graph] = []
        if options.plan is not None:
            for_gpus = bool(options.gpu_targets)
            ranks = add_ranks(writer, cpu, parts[0], plan, options.dump_ir, progress, for_gpus=for_gpus)
        rows, gpu = _add_gpu_parts(writer, parts, ranks, options, progress)
        cpu.add_headers()
        _add_tables(writer, parts, ssm_paths)
        writer.add_json(layout.CHECKS, cpu.digests)
        writer.add_json(layout.PLAN, plan.to_json())
        writer.add_json(layout.MODELS, model_record(parts, options.dtype, options.weights, packed, gpu).to_json())
        path = writer.finish(argv=argv, targets=options.targets, tools=_tools(options))
    return path, rows


def _check_targets(options: CompileOptions) -> None:
    """A wrong name should fail before minutes of work, and so should an artifact that nothing could run."""
    for target in options.gpu_targets:
        target_of(target)
    if not options.targets:
        raise CompileError(
            "no CPU program and no GPU target: nothing could run the artifact",
            "--isa none together with --target",
            "name a GPU architecture (--target sm_90), or leave --isa out",
        )


def _add_gpu_parts(
    writer: ArtifactWriter,
    parts: Sequence[ModelPart],
    ranks: Sequence[Graph],
    options: CompileOptions,
    progress: Progress,
) -> tuple[list[dict[str, Any]], GpuRecord | None]:
    if not options.gpu_targets:
        return [], None
    from flexspec.kernels.package.gpu import add_gpu_parts

    return add_gpu_parts(writer, parts, options.gpu_targets, options.max_tree_tokens, progress, ranks)


def _add_tables(writer: ArtifactWriter, parts: Sequence[ModelPart], ssm_paths: Sequence[Path]) -> None:
    """Graphs, tokenizer, chat template, and the n-gram table of the first SSM folder that has one."""
    for part in parts:
        writer.add_bytes(layout.graph_file(part.name), print_graph(part.lowered).encode())
    llm: LoadedModel = parts[0].model
    assert llm.tokenizer_json is not None
    writer.add_bytes(layout.TOKENIZER, llm.tokenizer_json)
    if llm.chat_template:
        writer.add_bytes(layout.CHAT_TEMPLATE, llm.chat_template.encode())
    for drafter in drafter_records():
        if drafter.table is not None:
            _add_table(writer, drafter.name, drafter.table, ssm_paths, llm.config.vocab_size)


def _add_table(
    writer: ArtifactWriter, drafter: str, table: DraftTable, ssm_paths: Sequence[Path], vocab_size: int
) -> None:
    """The first of the SSM folders' tables. A damaged one, or another model's, is refused before it is served."""
    member = layout.drafter_table(drafter)
    file = next((path / member for path in ssm_paths if (path / member).is_file()), None)
    if file is not None:
        table.check(map_tensors(file, fix=table.rebuild), vocab_size, str(file))
        writer.add_file(member, file)


def _tools(options: CompileOptions) -> dict[str, str]:
    """Versions of what made the kernels."""
    tools = {}
    if options.cpu_isas:
        compiler = find_compiler()
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        tools["c++"] = next(iter(version.splitlines()), compiler)
    if options.gpu_targets:
        from flexspec.kernels.gpu.aot import triton_version

        tools["triton"] = triton_version()
    return tools

"""From a checkpoint and its SSMs to an artifact: graph, passes, generated code, packed weights, self-tests, plan.

Owns the order of these steps. What each part is called is in compiler/artifact/layout.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.plan import single_rank
from flexspec.compiler.artifact.tensor_file import map_tensors
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.compiler.frontends.loaded_model import LoadedModel
from flexspec.compiler.frontends.open_model import open_model
from flexspec.compiler.frontends.token_rows import first_rows, without_padding
from flexspec.compiler.planner.plan_file import check_runnable
from flexspec.drafters.record import DraftTable, drafter_records
from flexspec.errors import TokenizerError
from flexspec.kernels.package.devices.registry import PackageInputs, SharedRecords, chosen_targets, packagers
from flexspec.kernels.package.options import CompileOptions
from flexspec.kernels.package.pairing import check_pairing
from flexspec.kernels.package.parts import ModelPart, build_parts
from flexspec.kernels.package.ranks import add_ranks
from flexspec.kernels.package.record import model_record
from flexspec.progress import Progress
from flexspec.text import print_graph

if TYPE_CHECKING:
    from flexspec.kernels.gpu.package import ResourceRows


def compile_model(
    llm_path: Path,
    ssm_paths: Sequence[Path],
    out: Path,
    options: CompileOptions,
    *,
    argv: Sequence[str],
    progress: Progress = lambda what, done, of: None,
) -> tuple[Path, ResourceRows]:
    """Compile and write ``out``; returns its path and the GPU resource table (empty without GPU targets).

    A C++ compiler is needed for CPU programs only. Raises the loaders' errors, CompileError, ToolchainError,
    TokenizerError.
    """
    targets = chosen_targets(options)  # a wrong name should fail before minutes of work
    progress("reading the model files", 0, 1)
    llm = without_padding(open_model(llm_path))
    ssms = [first_rows(open_model(path), llm.config.vocab_size) for path in ssm_paths]
    check_pairing(llm, ssms)
    if llm.tokenizer_json is None:
        expected = f"{layout.TOKENIZER} or GGUF tokenizer data"
        raise TokenizerError(f"{llm_path} has no tokenizer", expected, "add the file")
    plan = options.plan or single_rank(llm.config.layers, len(ssms), options.draft)
    if options.plan is not None:
        check_runnable(plan, llm.config.layers, len(ssms))
    parts = build_parts(llm, llm_path, ssms, ssm_paths, options.dtype, options.weights, options.dump_ir)
    with ArtifactWriter(out) as writer:
        records = SharedRecords()
        packages = [
            packagers()[device].open(PackageInputs(names, options, writer, records, progress))
            for device, names in targets.items()
        ]
        for done, part in enumerate(parts):
            progress("compiling programs and packing weights", done, len(parts))
            for package in packages:
                package.add_model(part.name, part.lowered, part.get)
        progress("compiling programs and packing weights", len(parts), len(parts))
        if options.plan is not None:
            add_ranks(writer, packages, records, parts[0], plan, options.dump_ir, progress)
        for package in packages:
            package.finish()
        _add_tables(writer, parts, ssm_paths)
        writer.add_json(layout.CHECKS, records.digests)
        writer.add_json(layout.PLAN, plan.to_json())
        writer.add_json(layout.MODELS, model_record(parts, options.dtype, options.weights, records).to_json())
        names = [name for names in targets.values() for name in names]
        path = writer.finish(argv=argv, targets=names, tools=records.tools)
    return path, records.resources


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

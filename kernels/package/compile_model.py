"""From a checkpoint and its SSMs to an artifact: graph, passes, generated code, packed weights, self-tests, plan.

Owns the order of these steps. What each part is called is in compiler/artifact/layout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.model_record import LLM, GpuRecord, ModelRecord, PartRecord
from flexspec.compiler.artifact.ngram_table import check_vocabulary, load_table
from flexspec.compiler.artifact.plan import Plan, single_rank
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.compiler.frontends.open_model import LoadedModel, check_weights, open_model
from flexspec.compiler.passes.pipeline import LLM_PASSES, SSM_PASSES, run_passes
from flexspec.compiler.planner.plan_file import check_runnable
from flexspec.draft_plan import DraftPlan
from flexspec.errors import CompileError, TokenizerError
from flexspec.graph import Graph
from flexspec.kernels.cpu.build import find_compiler, header_files, target_isas
from flexspec.kernels.cpu.pack import GetWeight, PackedWeight, pack
from flexspec.kernels.cpu.render import CpuProgram, render
from flexspec.kernels.gpu.targets import target_of
from flexspec.kernels.package.cpu import add_program
from flexspec.kernels.package.ranks import add_ranks
from flexspec.models.fused_state import graft_fuse_head
from flexspec.models.registry import build_model, expected_weights
from flexspec.text import print_graph
from flexspec.types import DType, Role

Progress = Callable[[str, int, int], None]  # (what, done, of)


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What the user may choose. ``gpu_targets``: sm_80, gfx942...; ``isas`` empty means all of this machine's kind."""

    dtype: DType = DType.BF16
    gpu_targets: tuple[str, ...] = ()
    isas: tuple[str, ...] = ()
    draft: DraftPlan = DraftPlan("off")
    max_tree_tokens: int = 64
    dump_ir: Path | None = None
    plan: Plan | None = None  # of several ranks; None is one rank


@dataclass(slots=True)
class _Part:
    """One model on its way into the artifact."""

    name: str
    model: LoadedModel
    graph: Graph
    lowered: Graph
    get: GetWeight
    program: CpuProgram
    arrays: list[NDArray[np.generic]] = field(default_factory=list)
    places: list[list[str]] = field(default_factory=list)  # [file, tensor] of each weight-table entry


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

    Raises the loaders' errors, CompileError, ToolchainError, TokenizerError.
    """
    for target in options.gpu_targets:
        target_of(target)  # a wrong name should fail before minutes of work
    progress("reading the model files", 0, 1)
    llm = open_model(llm_path)
    ssms = [open_model(path) for path in ssm_paths]
    _check_pairing(llm, ssms)
    if llm.tokenizer_json is None:
        raise TokenizerError(
            f"{llm_path} has no tokenizer", f"{layout.TOKENIZER} or GGUF tokenizer data", "add the file"
        )
    plan = options.plan
    if plan is not None:
        check_runnable(plan, llm.config.layers, len(ssms))
    parts = _parts(llm, llm_path, ssms, ssm_paths, options)
    with ArtifactWriter(out) as writer:
        _add_weights(writer, parts, progress)
        checks = {part.name: _add_program(writer, part, options, progress) for part in parts}
        ranks: list[Graph] = []
        if plan is not None:
            ranks, rank_checks = add_ranks(
                writer, parts[0].graph, parts[0].get, plan, options.isas or target_isas(), options.dump_ir, progress,
                for_gpus=bool(options.gpu_targets),
            )  # fmt: skip
            checks |= rank_checks
        rows, gpu = _add_gpu_parts(writer, parts, ranks, options, progress)
        _add_tables(writer, parts, ssm_paths, checks, options)
        writer.add_json(layout.MODELS, _model_record(parts, options, gpu).to_json())
        targets = [layout.cpu_target(isa) for isa in options.isas or target_isas()] + list(options.gpu_targets)
        path = writer.finish(argv=argv, targets=targets, tools=_tools(options))
    return path, rows


def _check_pairing(llm: LoadedModel, ssms: Sequence[LoadedModel]) -> None:
    """An SSM with another vocabulary would draft wrong words for ever, silently (sglang#24051)."""
    fused = [ssm for ssm in ssms if ssm.fused is not None]
    if len(fused) > 1:
        raise CompileError(
            f"{len(fused)} SSMs that read hidden states", "at most one", "give one of them, beside any plain SSMs"
        )
    for ssm in ssms:
        if ssm.config.vocab_size != llm.config.vocab_size:
            raise CompileError(
                f"SSM {ssm.name} has a vocabulary of {ssm.config.vocab_size}",
                f"the LLM's, {llm.config.vocab_size}",
                "use an SSM made for this LLM (flexspec tune makes one)",
            )
        both = ssm.tokenizer_json and llm.tokenizer_json
        if both and _vocabulary(ssm.tokenizer_json) != _vocabulary(llm.tokenizer_json):
            raise CompileError(
                f"SSM {ssm.name} has another tokenizer of the same size",
                "the LLM's own tokens",
                "use an SSM made for this LLM (flexspec tune makes one)",
            )


def _vocabulary(tokenizer_json: bytes | None) -> dict[str, int]:
    from tokenizers import Tokenizer

    assert tokenizer_json is not None
    return dict(Tokenizer.from_buffer(tokenizer_json).get_vocab(with_added_tokens=True))


def _parts(
    llm: LoadedModel,
    llm_path: Path,
    ssms: Sequence[LoadedModel],
    ssm_paths: Sequence[Path],
    options: CompileOptions,
) -> list[_Part]:
    fused = next((ssm for ssm in ssms if ssm.fused is not None), None)
    taps = fused.fused.tap_layers if fused and fused.fused else ()
    plain = build_model(llm.config, options.dtype)
    check_weights(llm.weights, expected_weights(plain), llm_path)
    graph = graft_fuse_head(build_model(llm.config, options.dtype, taps=taps)) if fused else plain
    head = fused.weights.get if fused else llm.weights.get
    parts = [_part(LLM, llm, graph, lambda n: (head if n.startswith("fuse.") else llm.weights.get)(n), options)]
    for i, (ssm, path) in enumerate(zip(ssms, ssm_paths, strict=True)):
        name = "ssm" if i == 0 else f"ssm{i + 1}"
        if ssm.fused is not None:
            parts.append(_fused_part(name, ssm, path, llm, graph, options))
        else:
            ssm_graph = build_model(ssm.config, options.dtype, name=name)
            check_weights(ssm.weights, expected_weights(ssm_graph), path)
            parts.append(_part(name, ssm, ssm_graph, ssm.weights.get, options))
    return parts


def _fused_part(
    name: str, ssm: LoadedModel, path: Path, llm: LoadedModel, llm_graph: Graph, options: CompileOptions
) -> _Part:
    """The hidden-state SSM: embedding and head rows are the LLM's own, the fuse head lives on the LLM's graph."""
    graph = build_model(ssm.config, options.dtype, **ssm.build_options, name=name)
    keep_ids = ssm.fused.keep_ids if ssm.fused else None
    lent = ("embed_tokens.weight", "lm_head.weight")
    wanted = {n: shape for n, shape in expected_weights(graph).items() if n not in lent}
    wanted |= {n: shape for n, shape in expected_weights(llm_graph).items() if n.startswith("fuse.")}
    check_weights(ssm.weights, wanted, path)
    head = "embed_tokens.weight" if llm.config.tied_embeddings else "lm_head.weight"

    def get(weight: str) -> NDArray[np.float32]:
        if weight == "embed_tokens.weight":
            return llm.weights.get(weight)
        if weight == "lm_head.weight":
            rows = llm.weights.get(head)
            return rows if keep_ids is None else rows[keep_ids]
        return ssm.weights.get(weight)

    return _part(name, ssm, graph, get, options)


def _part(name: str, model: LoadedModel, graph: Graph, get: GetWeight, options: CompileOptions) -> _Part:
    dump = options.dump_ir / name if options.dump_ir else None
    lowered = run_passes(graph, LLM_PASSES if name == LLM else SSM_PASSES, dump)
    return _Part(name, model, graph, lowered, get, render(lowered))


def _add_weights(writer: ArtifactWriter, parts: Sequence[_Part], progress: Progress) -> None:
    """Pack every weight table; an SSM's embedding that is the LLM's own is stored once."""
    shared: dict[str, tuple[list[str], NDArray[np.generic]]] = {}
    total = sum(len(part.program.weights) for part in parts)
    done = 0
    for part in parts:
        file = layout.packed_weights(part.name)
        tensors: dict[str, NDArray[np.generic]] = {}
        for i, entry in enumerate(part.program.weights):
            borrowed = shared.get(_share_key(part, entry))
            if borrowed is not None:
                place, array = borrowed
            else:
                array = pack(entry, part.get, part.program.dtype)
                place = [file, f"{i:03d}.{entry.kind}"]
                tensors[place[1]] = array
            if part.name == LLM and entry.names == ("embed_tokens.weight",):
                shared["embed_tokens.weight"] = (place, array)
            part.places.append(place)
            part.arrays.append(array)
            done += 1
            progress("packing weights", done, total)
        bf16 = [name for name, array in tensors.items() if array.dtype == np.uint16]
        writer.add_tensors(file, tensors, bf16=bf16)


def _share_key(part: _Part, entry: PackedWeight) -> str:
    return entry.names[0] if part.model.fused and entry.kind == "matrix" and len(entry.names) == 1 else ""


def _add_program(writer: ArtifactWriter, part: _Part, options: CompileOptions, progress: Progress) -> dict[str, str]:
    """Generated source and libraries; digests of the self-test for the instruction sets that run here."""
    progress(f"compiling {part.name}", 0, 1)
    isas = options.isas or target_isas()
    digests = add_program(writer, part.name, part.program, part.lowered, part.arrays, isas)
    progress(f"compiling {part.name}", 1, 1)
    return digests


def _add_gpu_parts(
    writer: ArtifactWriter, parts: Sequence[_Part], ranks: Sequence[Graph], options: CompileOptions, progress: Progress
) -> tuple[list[dict[str, Any]], GpuRecord | None]:
    if not options.gpu_targets:
        return [], None
    from flexspec.kernels.package.gpu import GpuModel, add_gpu_parts

    models = [GpuModel(part.name, part.lowered, part.get) for part in parts]
    return add_gpu_parts(writer, models, options.gpu_targets, options.max_tree_tokens, progress, ranks)


def _add_tables(
    writer: ArtifactWriter,
    parts: Sequence[_Part],
    ssm_paths: Sequence[Path],
    checks: dict[str, dict[str, str]],
    options: CompileOptions,
) -> None:
    for name, text in header_files().items():
        writer.add_bytes(layout.cpu_header(name), text)
    for part in parts:
        writer.add_bytes(layout.graph_file(part.name), print_graph(part.lowered).encode())
    llm = parts[0].model
    assert llm.tokenizer_json is not None
    writer.add_bytes(layout.TOKENIZER, llm.tokenizer_json)
    if llm.chat_template:
        writer.add_bytes(layout.CHAT_TEMPLATE, llm.chat_template.encode())
    table = next((path / layout.NGRAM_TABLE for path in ssm_paths if (path / layout.NGRAM_TABLE).is_file()), None)
    if table is not None:
        # Refuse a damaged one, or another model's, now and not when it is served.
        check_vocabulary(load_table(table), llm.config.vocab_size, str(table))
        writer.add_file(layout.NGRAM_TABLE, table)
    writer.add_json(layout.CHECKS, checks)
    plan = options.plan or single_rank(llm.config.layers, len(parts) - 1, options.draft)
    writer.add_json(layout.PLAN, plan.to_json())


def _model_record(parts: Sequence[_Part], options: CompileOptions, gpu: GpuRecord | None) -> ModelRecord:
    llm = parts[0].model
    return ModelRecord(
        name=llm.name,
        source_hash=llm.source_hash,
        dtype=options.dtype.value,
        bos_id=llm.config.bos_id,
        eos_ids=tuple(llm.config.eos_ids),
        special_tokens=dict(llm.special_tokens),
        models=tuple(_part_record(part) for part in parts),
        gpu=gpu,
    )


def _part_record(part: _Part) -> PartRecord:
    config, facts = part.model.config, part.program.facts
    keep = part.model.fused.keep_ids if part.model.fused else None
    return PartRecord(
        name=part.name,
        family=config.family,
        graph_hash=part.graph.hash(),
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        outputs=facts.outputs,
        max_positions=config.max_positions,
        feature_columns=facts.feature_columns,
        reads_features=facts.reads_features,
        parameter_bytes=sum(v.type.bytes({}) for v in part.graph.inputs_of(Role.WEIGHT)),
        keep_ids=None if keep is None else tuple(int(i) for i in keep),
        weights=tuple((file, tensor) for file, tensor in part.places),
    )


def _tools(options: CompileOptions) -> dict[str, str]:
    import subprocess

    compiler = find_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    tools = {"c++": next(iter(version.splitlines()), compiler)}
    if options.gpu_targets:
        from flexspec.kernels.gpu.aot import triton_version

        tools["triton"] = triton_version()
    return tools

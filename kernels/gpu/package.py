"""The generated kernels of an artifact: write source, description and binaries; read them back on the GPU machine.

Layout under ``kernels/``, one folder a variant: ``source.CONFIG.py``, ``TARGET.ENTRY.bin`` and ``meta.json``, which
names the file, hash, launch facts and resources of each. Owns that layout; it neither compiles nor launches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flexspec.checked_table import Table
from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.manifest import damaged
from flexspec.errors import ArtifactError
from flexspec.kernels.gpu.aot import (
    CompiledKernel,
    CompiledVariant,
    Report,
    Resources,
    compile_variants,
    resource_rows,
)
from flexspec.kernels.gpu.family import Variant, family_of
from flexspec.kernels.gpu.targets import target_of

Emit = Callable[[str, bytes], object]
ResourceRows = list[dict[str, str | int]]


def package_kernels(
    variants: Sequence[Variant],
    targets: Sequence[str],
    out: Emit | Path,
    *,
    cache_dir: Path | None = None,
    progress: Report | None = None,
) -> ResourceRows:
    """Compile ``variants`` for ``targets`` and hand every file to ``out`` (relative path, bytes), or a folder.

    Returns the resource table as rows. The files depend on variants, targets and Triton's version only. Raises
    CompileError and ToolchainError as ``compile_variants`` does.
    """
    emit = _writer(out) if isinstance(out, Path) else out
    compiled = compile_variants(variants, targets, cache_dir=cache_dir, progress=progress)
    for variant in dict.fromkeys(variants):
        _emit_variant(variant, [result for result in compiled if result.variant == variant], emit)
    return resource_rows(compiled)


def read_packaged(variant: Variant, target: str, read: Callable[[str], bytes]) -> CompiledVariant:
    """The compiled variant for ``target`` from a package; ``read`` gives a file's bytes by its relative path.

    Raises ArtifactError when the package has no binary for the target or a file does not have its hash.
    """
    targets = read_facts(variant.name, read)
    if target not in targets:
        raise ArtifactError(
            f"{variant.name} holds binaries for {', '.join(targets)}", f"one for {target}",
            f"compile again with --target {target}",
        )  # fmt: skip
    facts = targets[target]
    source = _read_checked(read, variant, facts.table("source")).decode()
    kernels = {
        entry: CompiledKernel(
            _read_checked(read, variant, kernel), dict(kernel.table("meta").body), kernel.record("resources", Resources)
        )
        for entry, kernel in facts.tables("kernels").items()
    }
    config = facts.record("config", family_of(variant.family).config_type)
    return CompiledVariant(variant, config, target_of(target), facts.text("triton"), source, kernels)


def read_facts(variant: str, read: Callable[[str], bytes]) -> dict[str, Table]:
    """What meta.json of a variant says of each target. Raises ArtifactError for a damaged file."""
    file = layout.gpu_kernel_facts(variant)
    try:
        body = json.loads(read(file))
    except (ValueError, RecursionError):
        raise damaged(f"{file} is not JSON", "a JSON file") from None
    return Table.of(body, file, damaged).tables("targets")


def format_rows(rows: ResourceRows) -> str:
    """The resource table as aligned text, one line per kernel."""
    if not rows:
        return ""
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _emit_variant(variant: Variant, compiled: Sequence[CompiledVariant], emit: Emit) -> None:
    targets: dict[str, Any] = {}
    sources: dict[str, bytes] = {}
    for result in compiled:
        source_file = f"source.{result.config.name}.py"
        sources[source_file] = result.source.encode()
        kernels = {}
        for entry, kernel in result.kernels.items():
            file = f"{result.target.name}.{entry}.bin"
            emit(layout.gpu_member(variant.name, file), kernel.binary)
            description = {"meta": kernel.meta, "resources": asdict(kernel.resources)}
            kernels[entry] = _file_record(file, kernel.binary) | description
        targets[result.target.name] = {
            "config": asdict(result.config),
            "triton": result.triton_version,
            "source": _file_record(source_file, sources[source_file]),
            "kernels": kernels,
        }
    for file, text in sorted(sources.items()):
        emit(layout.gpu_member(variant.name, file), text)
    parameters = asdict(variant) | {"dtype": variant.dtype.value}
    meta = {"family": variant.family, "variant": parameters, "targets": targets}
    emit(layout.gpu_kernel_facts(variant.name), (json.dumps(meta, sort_keys=True, indent=1) + "\n").encode())


def _file_record(file: str, data: bytes) -> dict[str, str]:
    return {"file": file, "sha256": hashlib.sha256(data).hexdigest()}


def _read_checked(read: Callable[[str], bytes], variant: Variant, record: Table) -> bytes:
    path = layout.gpu_member(variant.name, record.text("file"))
    data, digest = read(path), record.text("sha256")
    if hashlib.sha256(data).hexdigest() != digest:
        raise ArtifactError(f"{path} is damaged", f"sha256 {digest}", "compile the artifact again")
    return data


def _writer(folder: Path) -> Emit:
    def write(path: str, data: bytes) -> None:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    return write

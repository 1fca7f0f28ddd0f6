"""A tiny LLM and SSM as model files, compiled once, and artifacts that were changed after they were made."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny_models
from built_once import built_once

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.manifest import FileEntry, decode_manifest, encode_manifest
from flexspec.draft_plan import DraftPlan
from flexspec.kernels.cpu.build import supported_isas
from flexspec.kernels.package.compile_model import compile_model
from flexspec.kernels.package.options import CompileOptions
from flexspec.types import DType

VOCAB = len(tiny_models.byte_level_tokens())
PLAN = "budget:16/depth=6/sources=suffix+ngram+ssm"


def write_models(folder: Path) -> tuple[Path, Path]:
    """A GGUF LLM with tokenizer and chat template, and an SSM folder with other weights."""
    folder.mkdir(parents=True, exist_ok=True)
    llm = tiny_models.write_gguf(folder / "tiny.gguf", tiny_models.random_weights(VOCAB))
    ssm = tiny_models.write_huggingface(folder / "ssm", tiny_models.random_weights(VOCAB, seed=1))
    return llm, ssm


def compile_tiny(folder: Path, *, dtype: DType = DType.BF16, with_ssm: bool = True, draft: str = PLAN) -> Path:
    """``folder``/tiny.fspec for the best instruction set here (or FLEXSPEC_CPU_ISA), compiled now."""
    llm, ssm = write_models(folder / "models")
    options = CompileOptions(dtype, isas=supported_isas()[:1], draft=DraftPlan.parse(draft))
    path, _ = compile_model(
        llm, [ssm] if with_ssm else [], folder / "tiny.fspec", options, argv=["flexspec", "compile", "tiny.gguf"]
    )
    return path


def tiny_artifact(*, dtype: DType = DType.BF16, with_ssm: bool = True, draft: str = PLAN) -> Path:
    """What ``compile_tiny`` makes, compiled once for all tests: for reading only."""

    def make(folder: Path) -> None:
        compile_tiny(folder, dtype=dtype, with_ssm=with_ssm, draft=draft)

    return built_once("tiny", (dtype, with_ssm, draft, supported_isas()[0]), make) / "tiny.fspec"


def changed_copy(artifact: Path, out: Path, name: str, change: Callable[[bytes], bytes], *, signed: bool) -> Path:
    """A copy with the member ``name`` changed; ``signed`` puts the new digest into the manifest too."""
    shutil.copytree(artifact, out)
    data = change((out / name).read_bytes())
    (out / name).write_bytes(data)
    if signed:
        manifest = decode_manifest((out / layout.MANIFEST).read_bytes(), out.name)
        files = {**manifest.files, name: FileEntry(len(data), hashlib.sha256(data).hexdigest())}
        (out / layout.MANIFEST).write_bytes(encode_manifest(replace(manifest, files=files)))
    return out


def changed_json(artifact: Path, out: Path, name: str, edit: Callable[[Any], Any]) -> Path:
    """A signed copy whose JSON member was replaced by what ``edit`` returns (None: it was edited in place)."""

    def change(data: bytes) -> bytes:
        body = json.loads(data)
        result = edit(body)
        return json.dumps(body if result is None else result).encode()

    return changed_copy(artifact, out, name, change, signed=True)

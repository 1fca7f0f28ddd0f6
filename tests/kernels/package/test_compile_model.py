"""What is compiled for which device: an artifact for GPUs alone needs no C++ compiler, and says what it lacks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny_models
from artifacts import VOCAB, changed_json, write_models
from gguf.constants import GGMLQuantizationType

from benchmarks import gpu_serve
from flexspec.cli.main import main
from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.draft_plan import DraftPlan
from flexspec.errors import ArtifactError, CompileError
from flexspec.kernels.cpu.build import supported_isas
from flexspec.kernels.package.compile_model import compile_model
from flexspec.kernels.package.options import CompileOptions
from flexspec.runtime.open.engine import open_engine
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.types import DType
from flexspec.weight_formats.registry import weight_formats

BEST = supported_isas()[0]


@pytest.fixture(scope="module")
def gpu_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made where no C++ compiler is."""
    folder = tmp_path_factory.mktemp("gpu")
    llm, ssm = gpu_serve.write_models(folder)
    options = CompileOptions(DType.F32, targets=("sm_90",), isas=(), draft=DraftPlan.parse(gpu_serve.DRAFTS[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.devnull)
        patch.delenv("CXX", raising=False)
        argv = ["flexspec", "compile", "llm", "--isa", "none", "--target", "sm_90"]
        path, rows = compile_model(llm, [ssm], folder / "gpu.fspec", options, argv=argv)
    assert rows
    return path


def test_an_artifact_for_gpus_alone_has_no_cpu_program(gpu_only: Path) -> None:
    opened = OpenedArtifact.at(gpu_only)
    assert opened.manifest.targets == ("sm_90",) and "c++" not in opened.manifest.tools
    assert not any(name.endswith((".so", ".cpp", ".h")) for name in opened.files.names()) and not opened.digests
    for part in opened.record.models:
        assert not part.weights and part.outputs == part.vocab_size and part.max_positions
        assert opened.graph(part.name) and opened.canonical_weights(part.name)
    assert layout.packed_weights("llm") not in opened.files.names()


def test_served_on_a_cpu_it_says_what_is_missing(gpu_only: Path) -> None:
    with pytest.raises(ArtifactError, match=rf"kernels for cpu-{BEST}.*flexspec compile llm --target sm_90$"):
        open_engine(gpu_only, ServeOptions())


@pytest.mark.slow(reason="Triton's interpreter")
def test_it_writes_what_an_artifact_for_both_writes(gpu_only: Path, tmp_path: Path) -> None:
    both, _ = gpu_serve.compile_tiny(tmp_path, "sm_90")
    texts = [gpu_serve.generate(path, "interpret", "off", 4).text for path in (gpu_only, both)]
    assert len(texts[0]) == 4 and texts[0] == texts[1]


def test_nothing_to_run_on_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm, _ = write_models(tmp_path)
    with pytest.raises(CompileError, match="nothing could run the artifact"):
        compile_model(llm, [], tmp_path / "x.fspec", CompileOptions(isas=()), argv=["flexspec"])
    assert main(["compile", str(llm), "-o", str(tmp_path / "x.fspec"), "--isa", "none"]) == 2
    assert "--target sm_90" in capsys.readouterr().err
    assert main(["compile", str(llm), "-o", str(tmp_path / "x.fspec"), "--isa", "none,avx2"]) == 2
    assert "--isa none" in capsys.readouterr().err
    assert not (tmp_path / "x.fspec").exists()


def test_equal_weights_are_stored_once(tmp_path: Path) -> None:
    llm, _ = write_models(tmp_path)
    options = CompileOptions(isas=(BEST,))
    path, _ = compile_model(llm, [llm], tmp_path / "twice.fspec", options, argv=["flexspec"])
    opened = OpenedArtifact.at(path)
    first, second = opened.record.models
    assert first.weights == second.weights and layout.packed_weights("ssm") not in opened.files.names()
    open_engine(path, ServeOptions(threads=1, kv_tokens=256, measure=False)).close()


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_a_float16_checkpoint_stays_float16(tmp_path: Path, dtype: DType) -> None:
    """Half the bytes of float32 beside the bits of a program that was given them expanded."""
    weights = tiny_models.random_weights(VOCAB)
    kinds = {name: GGMLQuantizationType.F16 for name, array in weights.items() if array.ndim > 1}
    llm = tiny_models.write_gguf(tmp_path / "tiny.gguf", weights, types=kinds)
    opened = []
    for stored in (None, weight_formats()["f16"]):
        options = CompileOptions(dtype, isas=(BEST,), weights=stored)
        out = tmp_path / f"{stored.name if stored else 'plain'}.fspec"
        path, _ = compile_model(llm, [], out, options, argv=["flexspec"])
        opened.append(OpenedArtifact.at(path))
    plain, half = opened
    assert (plain.record.weight_format, half.record.weight_format) == (dtype.value, "f16")
    assert plain.digests == half.digests
    sizes = [part.parameter_bytes / part.parameters for part in (plain.record.models[0], half.record.models[0])]
    assert sizes == pytest.approx([dtype.size_bytes, 2], rel=0.05) and plain.record.dtype == half.record.dtype
    assert half.graph("llm").types()["embed_tokens.weight"].stored == "f16"


def test_sizes_that_are_not_the_graphs_are_refused(gpu_only: Path, tmp_path: Path) -> None:
    path = changed_json(
        gpu_only, tmp_path / "x.fspec", layout.MODELS, lambda body: body["models"][0].update(feature_columns=64)
    )
    with pytest.raises(ArtifactError, match="the graph of llm differ in sizes"):
        OpenedArtifact.at(path).graph("llm")

"""From ``compile --target`` to tokens: a tiny model and its SSM through the commands, on the CPU and interpreted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu_serve
from flexspec.cli import main as cli
from flexspec.compiler.artifact.model_record import record_from_json
from flexspec.compiler.artifact.open import Artifact, open_artifact
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.draft_plan import DraftPlan
from flexspec.errors import ArtifactError, CapacityError, RequestError, ToolchainError
from flexspec.kernels.cpu.build import supported_isas
from flexspec.kernels.package.compile_model import compile_model
from flexspec.kernels.package.gpu import canonical_weight
from flexspec.kernels.package.options import CompileOptions
from flexspec.models.config import ModelConfig
from flexspec.models.llama import build_llama
from flexspec.retype import store_weights
from flexspec.runtime.backends import triton as triton_backend
from flexspec.runtime.backends.registry import Needs, backend_of
from flexspec.runtime.executors import triton as triton_executor
from flexspec.runtime.executors.room import Room
from flexspec.types import DType, Role
from flexspec.weight_formats.registry import weight_formats

pytestmark = pytest.mark.slow(reason="interprets kernels in processes of their own")

VARIANTS = ("tree_verify_d16_g2_w2_p32", "incremental_d16_g2_w2_p32")


@dataclass(frozen=True)
class Made:
    """The artifact for sm_90, opened, and what the compiler printed."""

    artifact: Artifact
    printed: str

    @property
    def root(self) -> Path:
        return self.artifact.root

    def open_gpu(self, device: str = "interpret", tree_rows: int = 9) -> triton_backend.TritonKernels:
        kernels = backend_of(device).open(OpenedArtifact.of(self.artifact), Needs(tree_rows))
        assert isinstance(kernels, triton_backend.TritonKernels)
        return kernels


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    path, printed = gpu_serve.compile_tiny(tmp_path_factory.mktemp("tiny"), "sm_90")
    return Made(open_artifact(path), printed)


@pytest.mark.parametrize("draft", gpu_serve.DRAFTS)
def test_interpreted_kernels_give_the_tokens_of_the_cpu(made: Made, draft: str) -> None:
    right, ours = (gpu_serve.generate(made.root, device, draft, 6) for device in ("cpu", "interpret"))
    assert ours.text == right.text and len(right.text) == 6 and len(set(right.text)) >= 4
    rates = [summary.split(", ")[2] for summary in (right.summary, ours.summary)]
    assert rates[0] == rates[1] and (rates[0] == "1.00 tokens a round") == (draft == "off")


def test_artifact_lists_what_the_kernels_take(made: Made) -> None:
    rows = [line.split() for line in made.printed.splitlines()[1:5]]
    assert [(row[0].rsplit("_r", 1)[0], row[1], row[2]) for row in rows] == [
        (variant, "sm_90", kernel) for variant in VARIANTS for kernel in ("attend", "merge")
    ]
    for folder in {row[0] for row in rows}:
        kernels = made.artifact.read_json(f"kernels/{folder}/meta.json")["targets"]["sm_90"]["kernels"]
        for each in kernels.values():
            assert each["resources"]["registers"] > 0 and each["resources"]["spill_bytes"] == 0


def test_shared_embedding_is_stored_once(made: Made) -> None:
    weights = made.artifact.read_json("model.json")["gpu"]["weights"]
    assert weights["ssm"]["embed_tokens.weight"] == ["weights/llm.canonical.safetensors", "embed_tokens.weight"]
    assert weights["ssm"]["layers.0.mlp.up_proj.weight"][0] == "weights/ssm.canonical.safetensors"
    llm, ssm = (made.artifact.tensors(f"weights/{name}.canonical.safetensors") for name in ("llm", "ssm"))
    assert set(llm) - set(ssm) == {"embed_tokens.weight"}
    assert "embed_tokens.weight" not in ssm and llm["embed_tokens.weight"].shape[1] == 64


def test_without_a_target_the_other_files_are_the_same_bytes(made: Made, tmp_path: Path) -> None:
    llm, ssm = gpu_serve.write_models(tmp_path)
    options = CompileOptions(DType.F32, isas=(supported_isas()[0],), draft=DraftPlan.parse(gpu_serve.DRAFTS[1]))
    path, rows = compile_model(llm, [ssm], tmp_path / "cpu.fspec", options, argv=["flexspec", "compile", "llm"])
    plain = open_artifact(path)
    assert rows == [] and set(plain.names()) < set(made.artifact.names())
    for name in set(plain.names()) - {"model.json"}:
        assert plain.read_bytes(name) == made.artifact.read_bytes(name), name
    record = made.artifact.read_json("model.json")
    assert record.pop("gpu")["max_tree_tokens"] == gpu_serve.MAX_TREE and plain.read_json("model.json") == record
    with pytest.raises(ArtifactError, match="flexspec compile llm --target sm_90"):
        Made(plain, "").open_gpu()


def test_machine_without_a_gpu_is_told_in_one_line(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["generate", str(made.root), "-p", "x", "--device", "cuda"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("flexspec generate: FS302: no CUDA device") and told.count("\n") == 1


def test_interpreter_that_was_not_asked_for_in_time_is_told(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ToolchainError, match="TRITON_INTERPRET=1"):
        made.open_gpu().executor("llm", Room(16, 4))


def test_another_architecture_names_the_rebuild_command(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "gpu_architecture", lambda: "sm_80")
    with pytest.raises(ArtifactError, match=r"flexspec compile llm .*--target sm_90 .*--target sm_80$"):
        made.open_gpu("cuda")
    monkeypatch.setattr(triton_backend, "gpu_architecture", lambda: "sm_61")
    with pytest.raises(ToolchainError, match="sm_61"):
        made.open_gpu("cuda")
    monkeypatch.setattr(triton_backend, "gpu_architecture", lambda: "sm_90")
    assert made.open_gpu("cuda").name == "sm_90"
    with pytest.raises(RequestError, match="'tpu'.*cpu, cuda, interpret"):
        made.open_gpu("tpu")


def test_trees_larger_than_the_kernels_are_refused(made: Made) -> None:
    assert made.open_gpu(tree_rows=80).record.max_tree_tokens == 80
    with pytest.raises(CapacityError, match="--max-tree 81"):
        made.open_gpu(tree_rows=81)


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ({"max_tree_tokens": -1, "weights": {}}, "gpu.max_tree_tokens: -1"),
        ({"max_tree_tokens": 64, "weights": {"llm": {}}}, "gpu.weights: weights of"),
        (
            {"max_tree_tokens": 64, "weights": {"llm": {"norm.weight": ["file"]}, "ssm": {}}},
            "norm.weight: .*a pair",
        ),
        ([], r"gpu: \[\]"),
    ],
)
def test_malformed_record_is_an_error(made: Made, part: Any, found: str) -> None:
    body = json.loads(json.dumps(made.artifact.read_json("model.json"))) | {"gpu": part}
    with pytest.raises(ArtifactError, match=found):
        record_from_json(body)


def test_missing_tensor_is_an_error(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    models = made.open_gpu()
    monkeypatch.setattr(Artifact, "tensors", lambda self, name: {})
    with pytest.raises(ArtifactError, match="no tensor"):
        models.executor("llm", Room(16, 4))


@pytest.mark.parametrize("stored_as", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
def test_stored_weights_are_placed_as_they_were_rounded(dtype: DType, stored_as: str) -> None:
    graph = build_llama(ModelConfig("llama", 32, 64, 1, 4, 2, 16, 96, 1e-5, 64), dtype)
    graph = store_weights(graph, weight_formats()[stored_as])
    rng = np.random.default_rng(0)
    weights = {
        value.name: rng.standard_normal([int(dim) for dim in value.type.dims]).astype(np.float32)
        for value in graph.inputs_of(Role.WEIGHT)
    }
    stored = {value.name: canonical_weight(value, weights.__getitem__) for value in graph.inputs_of(Role.WEIGHT)}
    for array in stored.values():
        array.flags.writeable = False  # as from a mapped file
    placed, rounded = (triton_executor._place_weights(graph, each, torch.device("cpu")) for each in (stored, weights))
    for name in weights:
        assert torch.equal(placed[name], rounded[name]) and placed[name].dtype == rounded[name].dtype


def test_gpu_check_counts_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"cpu": "abcd", "cuda": "abxde"}
    monkeypatch.setattr(gpu_serve, "compile_tiny", lambda folder, target: (folder, ""))
    monkeypatch.setattr(
        gpu_serve, "generate", lambda path, device, draft: gpu_serve.GeneratedText(draft, device, texts[device], "")
    )
    assert gpu_serve.differences("sm_90", "cuda") == dict.fromkeys(gpu_serve.DRAFTS, 2)


def test_gpu_check_goes_on_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: Path, target: str) -> None:
        raise gpu_serve.CommandFailed(told)

    monkeypatch.setattr(gpu_serve, "compile_tiny", fail)
    told = "flexspec compile: FS302: no C++ compiler"
    assert gpu_serve.differences("sm_90", "cuda") == {} and "FS302" in capsys.readouterr().out
    told = "flexspec compile: FS301: broken"
    with pytest.raises(gpu_serve.CommandFailed, match="FS301"):
        gpu_serve.differences("sm_90", "cuda")

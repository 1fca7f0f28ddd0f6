"""``flexspec inspect`` of artifacts, models and graph files: pages, graph forms, typed errors."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from tiny_models import byte_level_tokens, random_weights, write_gguf, write_huggingface

from flexspec.cli.main import main
from flexspec.compiler.artifact.model_record import ModelRecord, PartRecord
from flexspec.compiler.artifact.plan import single_rank
from flexspec.compiler.artifact.write import ArtifactWriter
from flexspec.compiler.artifact.zip import pack_artifact
from flexspec.compiler.passes.pipeline import LLM_PASSES, SSM_PASSES, run_passes
from flexspec.draft_plan import DraftPlan
from flexspec.graph import Graph
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model
from flexspec.text import parse_graph, print_graph
from flexspec.types import DType, Role

CONFIG = ModelConfig("llama", 40, 32, 2, 4, 2, 8, 48, 1e-5, 64)
KERNEL = {"file": "sm_90.attend.bin", "resources": {"registers": 90, "spill_bytes": 0, "shared_bytes": 4096}}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSPEC_CACHE", str(tmp_path / "cache"))


def lowered(name: str) -> Graph:
    graph = build_model(CONFIG, DType.BF16, name=name)
    return run_passes(graph, LLM_PASSES if name == "llm" else SSM_PASSES)


def part(name: str) -> PartRecord:
    weights = build_model(CONFIG, DType.BF16).inputs_of(Role.WEIGHT)
    size = sum(value.type.bytes({}) for value in weights)
    return PartRecord(name, "llama", "ab" * 32, 2, 4, 2, 8, 40, 40, 64, 0, 0, size // 2, size, None, (("w", "0"),))


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """An artifact with everything that a page reads, and no kernel that runs."""
    record = ModelRecord("Tiny", "cd" * 32, "bf16", "bf16", 1, (2,), {}, (part("llm"), part("ssm")))
    with ArtifactWriter(tmp_path / "tiny.fspec") as writer:
        for name in ("llm", "ssm"):
            writer.add_bytes(f"graph/{name}.fsg", print_graph(lowered(name)).encode())
        writer.add_json("model.json", record.to_json())
        writer.add_json("plan.json", single_rank(2, 1, DraftPlan.parse("chain:4")).to_json())
        writer.add_json("checks.json", {"llm": {"avx2": "00"}, "ssm": {"avx2": "00"}})
        writer.add_bytes("kernels/tree_verify_d8/sm_90.attend.bin", bytes(1234))
        meta = {"targets": {"sm_90": {"kernels": {"attend": KERNEL}}}}
        writer.add_json("kernels/tree_verify_d8/meta.json", meta)
        return writer.finish(
            argv=["flexspec", "compile", "tiny.gguf", "-o", "tiny.fspec"],
            targets=["cpu-avx2", "sm_90"],
            tools={"c++": "g++ 12"},
        )


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["inspect", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_page_of_an_artifact(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = inspect(capsys, artifact)
    lines = {" ".join(line.split()) for line in page.splitlines()}
    assert {
        "name Tiny", f"source hash {'cd' * 32}", "format version 1", "targets cpu-avx2", "tools c++: g++ 12",
        "rebuild flexspec compile tiny.gguf -o tiny.fspec", "stages blocks 0 to 1 on ranks 0", "ssm ranks ssm: [0]",
        "tree ladder chain:4 (any batch)", "llm avx2", "kernels/tree_verify_d8/sm_90.attend.bin 1,234",
        "variant target kernel registers shared_bytes spill_bytes binary_bytes",
        "tree_verify_d8 sm_90 attend 90 4,096 0 1,234",
    } <= lines  # fmt: skip
    assert all(line == line.rstrip() for line in page.splitlines())


def test_page_as_json(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = json.loads(inspect(capsys, artifact, "--json"))
    assert [model["model"] for model in page["models"]] == ["llm", "ssm"]
    weights = build_model(CONFIG, DType.BF16).inputs_of(Role.WEIGHT)
    assert page["models"][0]["parameters"] == sum(value.type.elements({}) for value in weights)
    assert page["artifact"]["bytes"] == sum(row["bytes"] for row in page["files"])
    packed = pack_artifact(artifact, artifact.parent / "packed")
    assert json.loads(inspect(capsys, packed, "--json"))["models"] == page["models"]


def test_page_of_one_model_of_an_artifact(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("llm", "ssm"):
        page = json.loads(inspect(capsys, artifact, "--model", name, "--json"))
        assert page["model"]["model"] == name and page["model"]["canonical_hash"] == "ab" * 32
        assert page["graph"]["form"] == "lowered" and page["graph"]["hash"] == lowered(name).hash()
    assert "canonical_hash" in inspect(capsys, artifact) and "models" in inspect(capsys, artifact)
    assert "FS401: --model ssm2; expected one of llm, ssm." in refusal(capsys, artifact, "--model=ssm2")


def test_options_that_would_change_nothing_are_refused(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--canonical", "--dtype=f32", "--weights=f16"):
        assert "lowered" in refusal(capsys, artifact, option)
    graph = tmp_path / "graph.fsg"
    graph.write_text(print_graph(build_model(CONFIG, DType.BF16)))
    assert "--dtype f32 for a graph" in refusal(capsys, graph, "--dtype=f32")
    assert "--weights f16 for a graph" in refusal(capsys, graph, "--weights=f16")
    assert "--model drafter" in refusal(capsys, graph, "--model=drafter")


def test_what_can_be_inspected_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.md").write_text("# Notes, longer than a magic number\n")
    for path in (tmp_path / "notes.md", tmp_path, tmp_path / "nothing.gguf"):
        said = refusal(capsys, path)
        assert "an artifact (folder or file), a .gguf file, a Hugging Face folder, or a graph" in said


def test_graphs_of_an_artifact(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("llm", "ssm"):
        text = inspect(capsys, artifact, "--emit=text", "--model", name)
        assert parse_graph(text) == lowered(name)
    assert json.loads(inspect(capsys, artifact, "--emit=json", "--lowered"))["hash"] == lowered("llm").hash()
    assert inspect(capsys, artifact, "--emit=dot").startswith('digraph "llm" {')


def test_models_give_canonical_and_lowered_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_weights(len(byte_level_tokens())))
    canonical = parse_graph(inspect(capsys, path, "--emit=text"))
    assert canonical == parse_graph(inspect(capsys, path, "--emit=text", "--canonical"))
    assert {node.op for node in canonical.nodes} >= {"linear", "swiglu", "add"}
    low = parse_graph(inspect(capsys, path, "--emit=text", "--lowered", "--dtype=f32"))
    assert {node.op for node in low.nodes} >= {"linear_group", "linear_swiglu", "linear_add"}
    assert low.inputs[-1].type.dtype is DType.F32
    stored = parse_graph(inspect(capsys, path, "--emit=text", "--weights=f16"))
    assert stored.types()["embed_tokens.weight"].stored == "f16" and stored.hash() != canonical.hash()
    page = inspect(capsys, path)
    assert canonical.hash() in page and "format" in page and "2 x 19 nodes" in page
    assert json.loads(inspect(capsys, path, "--json"))["graph"]["form"] == "canonical"
    assert json.loads(inspect(capsys, path, "--json", "--lowered"))["graph"]["form"] == "lowered"
    folder = write_huggingface(tmp_path / "hf", random_weights(300))
    assert json.loads(inspect(capsys, folder, "--json"))["model"]["layers"] == 2


def test_graph_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = build_model(CONFIG, DType.BF16)
    path = tmp_path / "graph.fsg"
    path.write_text("# a comment\n" + print_graph(graph))
    assert graph.hash() in inspect(capsys, path) and "as written" in inspect(capsys, path)
    assert parse_graph(inspect(capsys, path, "--emit=text")) == graph
    assert parse_graph(inspect(capsys, path, "--emit=text", "--lowered", "--model=ssm")) == run_passes(
        graph, SSM_PASSES
    )


@pytest.mark.skipif(importlib.util.find_spec("torch_mlir") is None, reason="torch-mlir is not installed")
def test_mlir_out_and_in(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "llm.mlir"
    path.write_text(inspect(capsys, artifact, "--emit=mlir"))
    assert parse_graph(inspect(capsys, path, "--emit=text")) == lowered("llm")


def test_refusals_are_typed(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "FS401: --model ssm2; expected one of llm, ssm." in refusal(capsys, artifact, "--emit=text", "--model=ssm2")
    assert "an artifact's graphs as compiled, lowered" in refusal(capsys, artifact, "--emit=text", "--canonical")
    assert "one of them" in refusal(capsys, artifact, "--emit=text", "--json")
    assert "FS203" in refusal(capsys, tmp_path / "nothing.gguf")
    assert "FS401" in refusal(capsys, tmp_path / "nothing.fspec")
    assert "FS203" in refusal(capsys, tmp_path)
    (tmp_path / "broken.fsg").write_text("graph g {\n  input %x\n  return %x\n}\n")
    assert "FS102: line 2" in refusal(capsys, tmp_path / "broken.fsg")
    (tmp_path / "illegal.fsg").write_text("graph g {\n  input %x: f32[T]:ids\n  return %y\n}\n")
    assert "FS101" in refusal(capsys, tmp_path / "illegal.fsg")
    (artifact / "graph" / "llm.fsg").write_text("changed")
    assert "FS401" in refusal(capsys, artifact)


@pytest.mark.parametrize(
    ("file", "body", "found"),
    [("checks.json", [1], "a list"), ("kernels/x/meta.json", {"targets": 3}, "targets: 3")],
)
def test_parts_of_an_unknown_form_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, body: object, found: str
) -> None:
    record = ModelRecord("Tiny", "cd" * 32, "bf16", "bf16", 1, (2,), {}, (part("llm"),))
    with ArtifactWriter(tmp_path / "odd.fspec") as writer:
        parts = {
            "model.json": record.to_json(),
            "plan.json": single_rank(2, 0, DraftPlan("off")).to_json(),
            "checks.json": {},
        }
        for name, contents in (parts | {file: body}).items():
            writer.add_json(name, contents)
        path = writer.finish(argv=["flexspec"], targets=[], tools={})
    answer = refusal(capsys, path)
    assert file in answer and found in answer

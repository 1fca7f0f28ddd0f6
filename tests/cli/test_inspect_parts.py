"""``flexspec inspect MODEL --partition PLAN.json``: pages of ranks, their graphs, typed errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexspec.cli.main import main
from flexspec.compiler.artifact.plan import Plan, Stage
from flexspec.compiler.partition.cut_ranks import partition
from flexspec.compiler.partition.lower_ranks import lower_ranks
from flexspec.compiler.passes.pipeline import LLM_PASSES
from flexspec.draft_plan import DraftLadder, DraftPlan
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model
from flexspec.text import parse_graph, print_graph
from flexspec.types import DType

GRAPH = build_model(ModelConfig("llama", 40, 32, 2, 4, 2, 8, 48, 1e-5, 64, output_bias=True), DType.BF16)
PLAN = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2,))), (), DraftLadder.of(DraftPlan("off")), "hand")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "graph.fsg").write_text(print_graph(GRAPH))
    (tmp_path / "plan.json").write_text(json.dumps(PLAN.to_json()))
    return [str(tmp_path / "graph.fsg"), "--partition", str(tmp_path / "plan.json")]


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["inspect", *words]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_a_line_a_rank(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = {" ".join(line.split()) for line in said(capsys, *words).splitlines()}
    assert "rank stage blocks degree parameter_bytes kv_bytes_a_token exchanges" in lines
    rows = json.loads(said(capsys, *words, "--json"))["ranks"]
    assert [row["exchanges"] for row in rows] == ["3 reduce, 1 send", "3 reduce", "1 recv"]
    assert [row["kv_bytes_a_token"] for row in rows] == [32, 32, 64]
    assert sum(row["parameter_bytes"] for row in rows) > sum(v.type.bytes({}) for v in GRAPH.inputs[8:-4])


def test_page_and_graph_of_a_rank(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    page = json.loads(said(capsys, *words, "--rank", "1", "--json"))
    cut = {row["weight"]: row["is"] for row in page["weights"]}
    assert cut["embed_tokens.weight"] == "20 to 40 of dim 0" and cut["layers.0.input_layernorm.weight"] == "whole"
    assert cut["layers.0.self_attn.o_proj.bias"] == "zeros, another rank has it"
    assert "layers.0.mlp.up_proj.weight" in said(capsys, *words, "--rank=1")
    parts, lowered = partition(GRAPH, PLAN.stages), lower_ranks(GRAPH, PLAN.stages, LLM_PASSES)
    for rank in (0, 1, 2):
        assert parse_graph(said(capsys, *words, "--rank", str(rank), "--emit=text")) == parts[rank].graph
        emitted = said(capsys, *words, "--rank", str(rank), "--emit=text", "--lowered")
        assert parse_graph(emitted) == lowered[rank].graph
    assert "reduce" in said(capsys, *words, "--rank=0", "--emit=dot")


def test_refusals(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "rank of the plan's stages: 0, 1, 2" in said(capsys, *words, "--rank=3", code=2)
    assert "choose a rank" in said(capsys, *words, "--emit=text", code=2)
    assert "pass the plan" in said(capsys, words[0], "--rank=1", code=2)
    (tmp_path / "bad.json").write_text("{")
    assert "flexspec plan -o" in said(capsys, words[0], "--partition", str(tmp_path / "bad.json"), code=2)
    (tmp_path / "bad.json").write_text(json.dumps(PLAN.to_json() | {"stages": PLAN.to_json()["stages"][:1]}))
    assert "FS104" in said(capsys, words[0], "--partition", str(tmp_path / "bad.json"), code=2)
    (tmp_path / "x.fspec").mkdir()
    assert "inspect the model file" in said(capsys, str(tmp_path / "x.fspec"), *words[1:], code=2)

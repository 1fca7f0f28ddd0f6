"""flexspec.compile and flexspec.plan: what the commands do, as functions."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
from artifacts import write_models

import flexspec
from flexspec import LLM, SamplingParams
from flexspec.api.plan import FoundPlan
from flexspec.cli.main import main
from flexspec.compiler.artifact.open import open_artifact
from flexspec.errors import CompileError, FlexspecError, MachineError, PlanError, RequestError
from flexspec.kernels.cpu.build import supported_isas
from repository import ROOT

BEST = supported_isas()[0]
CONFIGS = ROOT / "examples/configs"
SMALL: dict[str, Any] = {"machine": "cpu2", "acceptance": "smollm2-135m", "context": 128, "dtype": "f32"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


def test_compile_makes_what_the_command_makes_and_llm_opens_it(models: tuple[Path, Path], tmp_path: Path) -> None:
    llm, ssm = models
    made = flexspec.compile(llm, ssm=ssm, out=tmp_path / "a.fspec", isas=BEST, draft="chain:3")
    assert made.path == tmp_path / "a.fspec" and str(made.draft).startswith("chain:3") and made.size_bytes > 0
    words = ["compile", llm, "--ssm", ssm, "-o", tmp_path / "b.fspec", "--isa", BEST, "--draft", "chain:3"]
    assert main([str(word) for word in words]) == 0
    both = filecmp.dircmp(tmp_path / "a.fspec", tmp_path / "b.fspec")
    assert both.diff_files == ["manifest.json"], "they differ in the recorded command"
    rebuild = open_artifact(made.path).manifest.rebuild
    assert (
        rebuild
        == f"flexspec compile tiny.gguf -o a.fspec --dtype bf16 --ssm ssm --isa {BEST} --draft chain:3 --max-tree 64"
    )
    with LLM(made, threads=1, kv_tokens=1024, measure=False) as opened:
        assert opened.generate("hello", SamplingParams(max_tokens=4))[0].token_ids


def test_a_plan_that_was_found_can_be_compiled(models: tuple[Path, Path], tmp_path: Path) -> None:
    llm, ssm = models
    found = flexspec.plan(llm, ssm=[ssm], degrees=[2], **SMALL)
    assert [stage.ranks for stage in found.plan.stages] == [(0, 1)]
    flexspec.compile(llm, ssm=[ssm], plan=found, out=tmp_path / "x.fspec", dtype="f32", isas=[BEST])
    assert json.loads((tmp_path / "x.fspec/plan.json").read_text()) == json.loads(json.dumps(found.plan.to_json()))


@pytest.fixture(scope="module")
def proven() -> FoundPlan:
    return flexspec.plan(CONFIGS / "llama-65b.json", ssm=CONFIGS / "llama-68m.json", machine="a10x4x2", prove=True)


@pytest.mark.slow(reason="searches plans")
def test_plan_is_the_command_with_another_face(proven: FoundPlan, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", CONFIGS / "llama-65b.json", "--ssm", CONFIGS / "llama-68m.json", "--machine", "a10x4x2", "--prove"]
    assert main([*map(str, words)]) == 0
    assert capsys.readouterr().out == proven.page()
    assert main([*map(str, words), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(proven.to_json()))
    assert proven.certificate is not None and proven.certificate.proven
    assert proven.svg().startswith("<svg")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"isas": ["mmx"]}, CompileError, "mmx; expected one of"),
        ({"isas": "none"}, CompileError, "--target"),
        ({"targets": "sm_1"}, FlexspecError, "sm_1"),
        ({"dtype": "f64"}, CompileError, "dtype f64; expected one of bf16, f32"),
        ({"max_tree": 0}, CompileError, "1 to 512 nodes"),
        ({"draft": "sideways"}, RequestError, "sideways"),
        ({"draft": "budget:8/beam=2"}, RequestError, "beam=2 of ssm.* write sources="),
        ({"plan": "no-such.json"}, PlanError, "no-such.json"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    models: tuple[Path, Path], tmp_path: Path, options: dict[str, Any], error: type[FlexspecError], words: str
) -> None:
    with pytest.raises(error, match=words):
        flexspec.compile(models[0], out=tmp_path / "x.fspec", **options)
    assert not (tmp_path / "x.fspec").exists()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"machine": "abacus"}, MachineError, "abacus"),
        ({"objective": "joy"}, PlanError, "objective 'joy'"),
        ({"objective": "goodput"}, PlanError, "goodput without a limit"),
        ({"limit_ms": 20.0}, PlanError, "with --objective latency"),
        ({"dtype": "f64"}, CompileError, "dtype f64"),
        ({"degrees": [64]}, PlanError, "no plan of llama-65b"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, Any], error: type[FlexspecError], words: str) -> None:
    with pytest.raises(error, match=words):
        flexspec.plan(CONFIGS / "llama-65b.json", **{"machine": "a10x4x2", **options})

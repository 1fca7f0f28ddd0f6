"""Compile, open, generate in one process: what is refused, and that no file of an artifact can crash the process."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts import PLAN, VOCAB, changed_copy, changed_json, compile_tiny, tiny_artifact, write_models

from flexspec.compiler.artifact.ngram_table import build_table, save_table
from flexspec.draft_plan import DraftPlan
from flexspec.errors import ArtifactError, CapacityError, CompileError, RequestError
from flexspec.kernels.cpu.build import supported_isas
from flexspec.kernels.package.compile_model import compile_model
from flexspec.kernels.package.options import CompileOptions
from flexspec.runtime.engine.complete import Completion
from flexspec.runtime.open.engine import open_engine
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.runtime.open.served import Served
from flexspec.sampling import SamplingParams
from flexspec.types import DType

SMALL = ServeOptions(threads=1, kv_tokens=1024, measure=False)
BEST = supported_isas()[0]
LIBRARY = f"kernels/cpu/llm/{BEST}.so"


@pytest.fixture(scope="module")
def artifact() -> Path:
    return tiny_artifact()


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[Served]:
    served = open_engine(path, ServeOptions(**{"threads": 1, "kv_tokens": 1024, "measure": False, **options}))
    yield served
    served.close()


def answer(served: Served, text: str, params: SamplingParams) -> Completion:
    (completion,) = served.generate([text], params)
    assert served.engine.free_pages == served.executors[0].pages
    return completion


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_artifact_answers_the_same_with_every_draft(artifact: Path, dtype: DType) -> None:
    path = artifact if dtype is DType.BF16 else tiny_artifact(dtype=dtype, with_ssm=False)
    drafts = ["off", "auto", "chain:4", "budget:20"] + ["tree:2,2", "budget:9/sources=ssm"] * (dtype is DType.BF16)
    params = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=20, temperature=1.0, seed=3)]
    texts = set()
    for draft in drafts:
        with opened(path, draft=draft, measure=draft == "auto") as served:
            assert served.isa == BEST and served.context_tokens == 256 and served.name == "tiny"
            texts.add(tuple(answer(served, "hello 12 hello 12", one).text for one in params))
    assert len(texts) == 1


def test_options_decide_what_drafts(artifact: Path) -> None:
    for draft, expected in (
        ("auto", "budget:16/depth=6/sources=suffix+ssm"),  # the plan's, less the table that is not there
        ("chain:3", "chain:3/sources=suffix+ssm"),
        ("budget:8/sources=suffix", "budget:8/sources=suffix"),
        ("off", "off"),
    ):
        with opened(artifact, draft=draft) as served:
            assert str(served.draft) == expected
            assert len(served.executors) == 1 + ("ssm" in expected)
    with opened(artifact) as served:
        assert served.chat is not None and "<|im_start|>user\nhi" in served.chat.render(
            [{"role": "user", "content": "hi"}]
        )


def test_a_context_that_is_too_short_says_how_to_have_a_longer_one(artifact: Path) -> None:
    """By the option that set it: --context, --kv-tokens, or none for the model's own 256."""
    for options, limit, fix in (
        ({"context_tokens": 50}, 50, "shorten the prompt, or raise --context"),
        ({"draft": "chain:3", "kv_tokens": 64}, 60, "shorten the prompt, or raise --kv-tokens"),
        ({}, 256, "shorten the prompt"),
    ):
        with opened(artifact, **options) as served, pytest.raises(CapacityError) as caught:
            answer(served, "x" * 300, SamplingParams())
        assert f"fewer than {limit}, the longest prompt and output together" in caught.value.expected
        assert caught.value.fix == fix


def test_a_context_that_cannot_be_is_refused(artifact: Path) -> None:
    for options, expected in (
        ({"context_tokens": 1}, "2 to 256, the model's own"),
        ({"context_tokens": 257}, "2 to 256, the model's own"),
        ({"context_tokens": 200, "draft": "off", "kv_tokens": 64}, "2 to 63, what 64 KV tokens hold besides a tree"),
    ):
        with pytest.raises(CapacityError, match="--context") as caught, opened(artifact, **options):
            pass
        assert caught.value.expected == expected


def test_more_requests_than_rows_still_run(artifact: Path) -> None:
    with opened(artifact, draft="off", max_rows=8, max_requests=40, kv_tokens=4096) as served:
        done = served.generate([[i + 3] for i in range(40)], SamplingParams(max_tokens=5, ignore_eos=True))
        assert [one.finish_reason for one in done] == ["length"] * 40


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"draft": "budget:8/sources=ssm2"}, ArtifactError, "no ssm2.*suffix, ssm"),
        ({"draft": "budget:8/sources=ngram"}, ArtifactError, "no ngram"),
        ({"draft": "sideways:8"}, RequestError, "sideways"),
        ({"draft": "budget:8/beam=2/sources=suffix"}, RequestError, "beam=2 of ssm, with sources suffix;"),
        ({"draft": "budget:200", "kv_tokens": 128}, CapacityError, "--kv-tokens"),
        ({"draft": "tree:8,8,2", "max_rows": 16}, CapacityError, "draft rows"),
    ],
)
def test_options_that_cannot_work(artifact: Path, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words), opened(artifact, **options):
        pass


@pytest.mark.slow(reason="builds every program anew: 16 s of g++")
def test_same_models_give_the_same_bytes(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSPEC_CACHE", str(tmp_path / "cache"))  # the libraries are built anew
    again = compile_tiny(tmp_path / "elsewhere")
    names = sorted(str(path.relative_to(artifact)) for path in artifact.rglob("*") if path.is_file())
    assert LIBRARY in names and "weights/ssm.safetensors" in names
    assert filecmp.cmpfiles(artifact, again, names, shallow=False) == (names, [], [])
    assert str(tmp_path).encode() not in b"".join((again / name).read_bytes() for name in names)


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x5A]) + data[middle + 1 :]


@pytest.mark.parametrize("name", [LIBRARY, "weights/llm.safetensors", "model.json", "tokenizer.json", "checks.json"])
@pytest.mark.parametrize("change", [flip, lambda data: data[: len(data) // 2], lambda data: b""])
def test_damaged_files_are_named(artifact: Path, tmp_path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    damaged = changed_copy(artifact, tmp_path / "d.fspec", name, change, signed=False)
    with pytest.raises(ArtifactError, match=name) as caught:
        open_engine(damaged, SMALL)
    assert "flexspec compile" in caught.value.fix


def edit_llm(**changes: Any) -> Callable[[Any], None]:
    return lambda body: body["models"][0].update(changes)


LIES: dict[str, Callable[[Any], Any]] = {
    "outputs": edit_llm(outputs=VOCAB + 512),
    "both sizes": edit_llm(outputs=VOCAB + 512, vocab_size=VOCAB + 512),
    "positions": edit_llm(max_positions=1 << 40),
    "features": edit_llm(feature_columns=64),
    "features read": edit_llm(reads_features=64),
    "kept tokens": lambda body: body["models"][1].update(keep_ids=[VOCAB + 5] * VOCAB),
    "kept one": lambda body: body["models"][1].update(keep_ids=[1], outputs=1),
    "no weights": edit_llm(weights=[]),
    "weights reversed": lambda body: body["models"][0]["weights"].reverse(),
    "weights of another": lambda body: body["models"][0].update(weights=body["models"][1]["weights"][:3] * 9),
    "a tensor that is not there": lambda body: body["models"][0]["weights"][0].__setitem__(1, "nothing"),
    "a file that is not there": lambda body: body["models"][0]["weights"][0].__setitem__(0, "weights/x.safetensors"),
    "weights as numbers": edit_llm(weights=[1, 2]),
    "no models": lambda body: body.update(models=[]),
    "models twice": lambda body: body["models"].append(body["models"][0]),
    "a name outside": edit_llm(name="../llm"),
    "a list": lambda body: [body],
    "a number": lambda body: 7,
    "no end": lambda body: body.update(eos_ids=[1.5]),
    "a text for a number": lambda body: body.update(bos_id="one"),
    "no specials": lambda body: body.update(special_tokens=None),
    "missing": lambda body: body["models"][0].pop("layers") and None,
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("checks", [True, False])
def test_a_model_json_that_lies_is_refused(artifact: Path, tmp_path: Path, lie: str, checks: bool) -> None:
    path = changed_json(artifact, tmp_path / "lie.fspec", "model.json", LIES[lie])
    with pytest.raises(ArtifactError), opened(path, checks=checks):
        pass


def constantly(data: bytes) -> Callable[[bytes], bytes]:
    return lambda _: data


@pytest.mark.parametrize("checks", [True, False])
def test_a_library_that_is_none_is_refused(artifact: Path, tmp_path: Path, checks: bool) -> None:
    for i, data in enumerate((b"not a library", b"\x7fELF" + bytes(100))):
        path = changed_copy(artifact, tmp_path / f"{i}.fspec", LIBRARY, constantly(data), signed=True)
        with pytest.raises(ArtifactError, match="not a program of this version"), opened(path, checks=checks):
            pass


def test_self_test_finds_other_weights(artifact: Path, tmp_path: Path) -> None:
    path = changed_copy(artifact, tmp_path / "w.fspec", "weights/llm.safetensors", flip, signed=True)
    with pytest.raises(ArtifactError, match="computes other values"):
        open_engine(path, SMALL)
    with opened(path, checks=False) as served:
        assert answer(served, "hello", SamplingParams(max_tokens=3)).token_ids


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("checks.json", lambda body: [body]),
        ("checks.json", lambda body: {"llm": {BEST: 7}}),
        ("plan.json", lambda body: body.update(ladder=[[8, "sideways:3"]])),
        ("plan.json", lambda body: body.update(ladder=[])),
        ("plan.json", lambda body: body.update(ladder=[[8, "off"], [4, "off"]])),
        ("plan.json", lambda body: body.update(ladder=[[4, "off"], [8, "sideways:3"]])),
        ("plan.json", lambda body: body["stages"][0].update(ranks=[0, 0])),
        ("plan.json", lambda body: body["stages"][0].update(end_block=float("nan"))),
        ("plan.json", lambda body: [1]),
    ],
)
def test_other_tables_of_the_wrong_shape(artifact: Path, tmp_path: Path, name: str, edit: Any) -> None:
    path = changed_json(artifact, tmp_path / "t.fspec", name, edit)
    with pytest.raises(ArtifactError):
        open_engine(path, SMALL)


def test_other_instruction_sets(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worse = supported_isas()[-1]
    if worse == BEST:
        pytest.skip("this CPU has one instruction set")
    monkeypatch.setenv("FLEXSPEC_CPU_ISA", worse)
    with pytest.raises(ArtifactError, match=f"kernels for cpu-{worse}") as caught:
        open_engine(artifact, SMALL)
    assert "flexspec compile tiny.gguf" in caught.value.fix
    monkeypatch.setenv("FLEXSPEC_CPU_ISA", "mmx")
    with pytest.raises(CompileError, match="FLEXSPEC_CPU_ISA=mmx"):
        open_engine(artifact, SMALL)


def test_running_needs_no_compiler(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delenv("CXX", raising=False)
    with opened(artifact) as served:
        assert answer(served, "hello", SamplingParams(max_tokens=4)).token_ids


def test_a_table_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = [int(token) for token in rng.integers(0, VOCAB + 60, 200)]
    llm, ssm = write_models(tmp_path)
    save_table(build_table([([1], text)]), ssm / "ngram.safetensors")
    with pytest.raises(ArtifactError, match=f"tokens below the LLM's {VOCAB}"):
        options = CompileOptions(isas=(BEST,), draft=DraftPlan.parse(PLAN))
        compile_model(llm, [ssm], tmp_path / "x.fspec", options, argv=["flexspec", "compile"])
    assert not (tmp_path / "x.fspec").exists()

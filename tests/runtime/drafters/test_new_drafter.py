"""A drafter is two files: dropped in, it has its words in draft plans and help, its table in artifacts, and serves."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from artifacts import VOCAB, write_models
from engine_runs import Answer

import flexspec.drafters
import flexspec.runtime.drafters
from flexspec.cli.running import draft_plans_help
from flexspec.compiler.artifact.open import open_artifact
from flexspec.compiler.artifact.tensor_file import encode_tensors
from flexspec.draft_plan import DraftPlan, default_draft
from flexspec.drafters.record import drafter_records
from flexspec.errors import ArtifactError, RequestError
from flexspec.kernels.cpu.build import supported_isas
from flexspec.kernels.package.compile_model import compile_model
from flexspec.kernels.package.options import CompileOptions
from flexspec.runtime.open.engine import open_engine
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.sampling import SamplingParams
from repository import ROOT

RECORD = '''
"""after: the token that follows each token most often, from a table."""

from flexspec.drafters.record import DraftOption, DrafterRecord, DraftTable
from flexspec.errors import ArtifactError


def _check(arrays, vocab_size, where):
    if len(arrays["next"]) != vocab_size:
        found = f"{where}: a table of {len(arrays['next'])} tokens"
        raise ArtifactError(found, f"the LLM's {vocab_size}", "count again")


DRAFTER = DrafterRecord(
    "after", help="what follows each token", order=1, options=(DraftOption("steps", 3, 9, "tokens it looks ahead"),),
    table=DraftTable(_check, rebuild="count again"),
)
'''

CODE = '''
"""Chains from the table."""

from flexspec.tree import TokenTree


class AfterDrafter:
    name = "after"
    reads_features = False

    def __init__(self, table, steps):
        self._next, self._steps = table["next"].tolist(), steps

    def begin(self, request_id, prompt_ids): ...

    def observe_prompt(self, request_id, start, features_KE): ...

    def observe(self, request_id, committed, features_KE): ...

    def end(self, request_id): ...

    def propose(self, requests):
        return [self._chain(request) for request in requests]

    def _chain(self, request):
        tokens = [request.last_token]
        for _ in range(min(self._steps, request.max_nodes, request.max_depth)):
            tokens.append(self._next[tokens[-1]])
        return TokenTree.chain(tokens, "after")


def make(inputs):
    return AfterDrafter(inputs.table, max(plan.option("steps") for plan in inputs.plans))
'''


@pytest.fixture
def record() -> str:
    return RECORD


@pytest.fixture
def after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str) -> Iterator[None]:
    """The drafter in two files of its own, gone afterwards."""
    for package, source in ((flexspec.drafters, record), (flexspec.runtime.drafters, CODE)):
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / "after.py").write_text(source)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    yield
    for package in (flexspec.drafters, flexspec.runtime.drafters):
        sys.modules.pop(f"{package.__name__}.after", None)


def compiled(folder: Path, next_V: list[int]) -> Path:
    llm, ssm = write_models(folder)
    (ssm / "after.safetensors").write_bytes(b"".join(encode_tensors({"next": np.array(next_V, np.int32)})))
    options = CompileOptions(isas=supported_isas()[:1], draft=default_draft(1))
    return compile_model(llm, [ssm], folder / "x.fspec", options, argv=["flexspec", "compile"])[0]


@pytest.mark.usefixtures("after")
def test_two_files_are_enough_to_compile_and_serve(tmp_path: Path) -> None:
    artifact = compiled(tmp_path, list(range(VOCAB)))  # every token repeats, says the table
    assert "after.safetensors" in open_artifact(artifact).names()
    answers: dict[str, Answer] = {}
    for draft in ("off", "chain:4/sources=after", "budget:12/steps=2", "auto"):
        served = open_engine(artifact, ServeOptions(draft=draft, threads=1, kv_tokens=1024, measure=False))
        answers[str(served.draft)] = answer = Answer()
        prompt = served.tokenizer.encode("hello 12", add_special=True)
        served.engine.submit(prompt, SamplingParams(max_tokens=12), answer.deltas.append)
        while served.engine.step():
            pass
        served.close()
    assert len({answer.text for answer in answers.values()}) == 1
    assert list(answers) == [
        "off",
        "chain:4/sources=after",
        "budget:12/steps=2/sources=suffix+after+ssm",
        "budget:24/sources=suffix+after+ssm",
    ]
    assert [answer.deltas[-1].stats.drafted > 0 for answer in answers.values()] == [False, True, True, True]


@pytest.mark.usefixtures("after")
def test_its_table_is_checked_at_compile(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="after.safetensors: a table of 3 tokens"):
        compiled(tmp_path, [0, 1, 2])


@pytest.mark.usefixtures("after")
def test_it_has_its_words_in_draft_plans_and_help() -> None:
    assert DraftPlan.parse("budget:9/steps=5/sources=after").option("steps") == 5
    assert str(default_draft(2)) == "budget:24/sources=suffix+after+ngram+ssm+ssm2"
    assert "after             what follows each token\n" in draft_plans_help()
    assert "steps=N       tokens it looks ahead; 1 to 9, default 3\n" in draft_plans_help()
    with pytest.raises(RequestError, match="steps 10"):
        DraftPlan.parse("budget:9/steps=10")


@pytest.mark.usefixtures("after")
@pytest.mark.parametrize("record", [RECORD.replace(" order=1,", "")], ids=["unplaced"])
def test_without_a_place_it_drafts_where_it_is_named(tmp_path: Path) -> None:
    assert str(default_draft(1)) == "budget:24/sources=suffix+ngram+ssm"
    assert "after             what follows each token (only if named)\n" in draft_plans_help()
    artifact = compiled(tmp_path, list(range(VOCAB)))
    for draft, sources in (
        ("auto", "suffix+ssm"),
        ("chain:3", "suffix+ssm"),
        ("chain:3/sources=ssm+after", "ssm+after"),
    ):
        options = ServeOptions(draft=draft, threads=1, kv_tokens=1024, measure=False)
        with closing(open_engine(artifact, options)) as served:
            assert str(served.draft).endswith(f"/sources={sources}")


@pytest.mark.parametrize("text", ["budget:9/sources=after", "budget:9/steps=5"])
def test_without_the_files_its_words_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"after|steps"):
        DraftPlan.parse(text)


@pytest.mark.parametrize("name", [record.name for record in drafter_records()])
def test_every_record_has_its_code_and_its_row_in_the_page(name: str) -> None:
    assert callable(importlib.import_module(f"flexspec.runtime.drafters.{name}").make)
    assert f"\n| `{name}`" in (ROOT / "docs/design/drafting.md").read_text()

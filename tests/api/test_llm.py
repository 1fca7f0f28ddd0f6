"""flexspec.LLM on a tiny artifact: what it takes, gives and refuses, and that the names at the top are cheap."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from artifacts import tiny_artifact, write_models

import flexspec
from flexspec import LLM, SamplingParams
from flexspec.errors import ArtifactError, CapacityError, EngineError, FlexspecError, RequestError
from repository import ROOT

SMALL = {"threads": 1, "kv_tokens": 1024, "measure": False}
SHORT = SamplingParams(max_tokens=12)
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def artifact() -> Path:
    return tiny_artifact()


@pytest.fixture(scope="module")
def llm(artifact: Path) -> Iterator[LLM]:
    with LLM(artifact, **SMALL) as opened:
        yield opened


def test_prompts_are_texts_ids_and_chats_alone_or_together(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello 12", add_special=True)
    (by_text,) = llm.generate("hello 12", SHORT)
    (by_ids,) = llm.generate(ids, SHORT)
    (by_chat,) = llm.chat(CHAT, SHORT)
    assert by_text.token_ids == by_ids.token_ids and by_text.text == by_ids.text
    assert (by_text.prompt, by_ids.prompt) == ("hello 12", None) and by_text.prompt_ids == tuple(ids)
    assert by_chat.prompt is not None and "<|im_start|>user\nhello" in by_chat.prompt
    together = llm.generate(["hello 12", ids, CHAT], [SHORT, SHORT, SHORT])
    assert [one.token_ids for one in together] == [by_text.token_ids, by_ids.token_ids, by_chat.token_ids]
    assert [one.text for one in llm.chat([CHAT, CHAT], SHORT)] == [by_chat.text] * 2
    assert llm.generate([], SHORT) == []


def test_a_completion_says_how_it_came_about(llm: LLM) -> None:
    (one,) = llm.generate("hello hello hello hello", SamplingParams(max_tokens=40, ignore_eos=True))
    assert one.finish_reason == "length" and len(one.token_ids) == one.stats.completion_tokens == 40
    assert one.stats.prompt_tokens == len(one.prompt_ids) and one.stats.rounds > 0
    assert one.stats.tokens_per_round == 39 / one.stats.rounds
    assert one.stats.tokens_per_s == 39 / one.stats.decode_s
    assert (
        "".join(
            delta.text
            for delta in llm.stream("hello hello hello hello", SamplingParams(max_tokens=40, ignore_eos=True))
        )
        == one.text
    )


def test_speculation_changes_no_completion(artifact: Path, llm: LLM) -> None:
    params = [SHORT, SamplingParams(max_tokens=12, temperature=1.0, seed=4)]
    with LLM(str(artifact), draft="off", **SMALL) as plain:
        expected = plain.generate(["hello 12 hello"] * 2, params)
        assert plain.draft == "off" and "draft off" in repr(plain)
    assert [one.token_ids for one in llm.generate(["hello 12 hello"] * 2, params)] == [
        one.token_ids for one in expected
    ]
    assert llm.draft.startswith("budget:16")


@pytest.mark.parametrize(
    "prompts", [b"bytes", 7, None, [3.5], ["a", 4], [["a"]], [True], [[]], {"role": "user"}, [CHAT, 3]]
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="a prompt .*expected a text, a list of token ids"):
        llm.generate(prompts, SHORT)


@pytest.mark.parametrize("messages", ["hello", [1, 2], ["hello"], [CHAT, "hello"]])
def test_what_is_no_chat_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="expected a list of messages"):
        llm.chat(messages, SHORT)


def test_one_sampling_parameter_a_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="1 sampling parameters for 2 prompts"):
        llm.generate(["a", "b"], [SHORT])


def test_a_bad_prompt_stops_the_good_ones_too(llm: LLM) -> None:
    with pytest.raises(RequestError, match="token id 99999"):
        llm.generate(["hello", [99999]], SHORT)
    assert llm.generate("hello", SHORT)[0].token_ids


def test_leaving_a_stream_frees_its_memory(llm: LLM) -> None:
    for _ in range(8):  # the pool holds four requests of this length
        for delta in llm.stream("hello", SamplingParams(max_tokens=200)):
            assert delta.token_ids
            break
    assert len(llm.generate(["hello"] * 4, SamplingParams(max_tokens=200, ignore_eos=True))) == 4


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kv_token": 512}, RequestError, "option kv_token; .*did you mean kv_tokens?"),
        ({"sideways": 1}, RequestError, "option sideways; expected one of draft, device, threads"),
        ({"threads": "2"}, RequestError, "threads='2'; expected a value of type int"),
        ({"threads": -1}, CapacityError, "threads=-1; expected 0 to 512"),
        ({"device": "gpu"}, RequestError, "device='gpu'; expected one of cpu, cuda, interpret"),
        ({"draft": "sideways:8"}, RequestError, "sideways"),
        ({"context_tokens": 9000}, CapacityError, "9000"),
    ],
)
def test_options_are_checked_by_name_type_and_range(
    artifact: Path, options: dict[str, Any], error: type[FlexspecError], words: str
) -> None:
    with pytest.raises(error, match=words):
        LLM(artifact, **options)


def test_what_is_no_artifact_is_refused(tmp_path: Path) -> None:
    model, ssm = write_models(tmp_path)
    for path in (model, ssm):
        with pytest.raises(
            ArtifactError, match=r"is a model, not an artifact.*flexspec.compile\('.*', out='.*.fspec'\)"
        ):
            LLM(path)
    with pytest.raises(ArtifactError, match="does not exist"):
        LLM(tmp_path / "no.fspec")


def test_a_closed_one_says_so(artifact: Path) -> None:
    with LLM(artifact, **SMALL) as llm:
        stream = llm.stream("hello", SHORT)
        next(stream)
    llm.close()
    for call in (lambda: llm.generate("hello"), lambda: llm.stream("hello"), lambda: llm.name, lambda: next(stream)):
        with pytest.raises(EngineError):
            call()
    assert repr(llm) == "LLM(closed)"


def test_the_names_at_the_top_are_there_and_load_nothing_by_themselves() -> None:
    for name in flexspec.__all__:
        assert getattr(flexspec, name) is not None and name in dir(flexspec)
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        flexspec.LMM  # type: ignore[attr-defined]  # noqa: B018
    code = "import flexspec, sys; print(sorted(name for name in sys.modules if name.startswith(('flexspec', 'numpy'))))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['flexspec']"

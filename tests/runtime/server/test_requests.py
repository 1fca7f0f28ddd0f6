"""What is offered arrives in SamplingParams; what is not is refused by name; nothing is ignored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
from sampling_values import SAMPLING_VALUES
from scripted_engine import BOS, ByteTokenizer, PlainChat

from flexspec.errors import CapacityError, RequestError, TokenizerError
from flexspec.runtime.server.requests import GenerateBody, GenerationRequest, ServerLimits, read_chat, read_completion
from flexspec.sampling import SamplingParams, sampling_fields

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def limits() -> ServerLimits:
    return ServerLimits(context_tokens=512, max_choices=16)


def chat(limits: ServerLimits, **body: Any) -> GenerationRequest:
    return read_chat({"model": "m", "messages": HELLO, **body}, ByteTokenizer(), PlainChat(), limits)


def text(limits: ServerLimits, **body: Any) -> GenerationRequest:
    return read_completion({"model": "m", "prompt": "hello", **body}, ByteTokenizer(), limits)


def refused(call: Any, limits: ServerLimits, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call(limits, **body)
    return caught.value


def listed(value: Any) -> Any:
    """As JSON has it."""
    return list(value) if isinstance(value, tuple) else value


OFFERED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 2}, {"temperature": 2.0}),
    ({"temperature": None}, {}),
    ({"top_p": 0}, {"top_p": 0.0}),
    ({"stop": "end"}, {"stop": ("end",)}),
    ({"stop": []}, {}),
    ({"user": "someone"}, {}),
    *(({name: listed(values.other)}, {name: values.other}) for name, values in SAMPLING_VALUES.items()),
]


def test_every_sampling_parameter_is_offered_with_its_default_or_openais() -> None:
    defaults = {name: GenerateBody.model_fields[name].default for name in sampling_fields()}
    others = {"temperature": 1.0, "max_tokens": None, "stop": None}
    assert defaults == {field.name: field.default for field in fields(SamplingParams)} | others


@pytest.mark.parametrize(("body", "wanted"), OFFERED, ids=str)
@pytest.mark.parametrize("call", [chat, text])
def test_offered_parameters_reach_the_engine(call: Any, body: Any, wanted: Any, limits: ServerLimits) -> None:
    ask = call(limits, **body)
    defaults: dict[str, Any] = {"temperature": 1.0, "max_tokens": 16}
    if call is chat:
        defaults["max_tokens"] = limits.context_tokens - len([BOS, *"<user>hello\n<assistant>"])
    assert [sample.params for sample in ask.samples] == [SamplingParams(**{**defaults, **wanted})]


OUT_OF_RANGE: dict[str, Sequence[Any]] = {
    **{name: values.refused for name, values in SAMPLING_VALUES.items()},
    "n": [0, 17, "2", 1.0],
    "stream": ["yes", 1],
    "user": [3],
    "stream_options": [{"include_usage": True}, 3],  # without stream
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, values in OUT_OF_RANGE.items() for v in values], ids=repr)
@pytest.mark.parametrize("call", [chat, text])
def test_bad_values_are_refused_by_name(call: Any, name: str, value: Any, limits: ServerLimits) -> None:
    error = refused(call, limits, **{name: value})
    assert error.param == name
    assert name in str(error)


def test_missing_parameters_are_named(limits: ServerLimits) -> None:
    for body, name in (({"model": "m"}, "messages"), ({"messages": HELLO}, "model")):
        with pytest.raises(RequestError) as caught:
            read_chat(body, ByteTokenizer(), PlainChat(), limits)
        assert caught.value.param == name


def test_max_completion_tokens_is_max_tokens_under_its_new_name(limits: ServerLimits) -> None:
    assert chat(limits, max_completion_tokens=5).samples[0].params.max_tokens == 5
    assert chat(limits, max_completion_tokens=5, max_tokens=5).samples[0].params.max_tokens == 5
    assert refused(chat, limits, max_completion_tokens=5, max_tokens=6).param == "max_completion_tokens"
    error = refused(chat, limits, max_completion_tokens=0)
    assert error.param == "max_completion_tokens" and "max_completion_tokens=0" in str(error)
    assert text(limits, max_completion_tokens=5).samples[0].params.max_tokens == 5


def test_the_default_length_of_a_chat_answer_can_be_capped(limits: ServerLimits) -> None:
    capped = ServerLimits(limits.context_tokens, default_max_tokens=40)
    assert chat(capped).samples[0].params.max_tokens == 40
    assert chat(capped, max_tokens=50).samples[0].params.max_tokens == 50


def test_a_default_length_gives_way_to_the_context(limits: ServerLimits) -> None:
    long = "x" * (limits.context_tokens - 4)  # and BOS
    assert text(limits, prompt=long).samples[0].params.max_tokens == 3
    assert text(limits, prompt=long, max_tokens=3).samples


FULL = "This model's maximum context length is 512 tokens. However, "


@pytest.mark.parametrize(
    ("length", "asked", "words"),
    [
        (511, {}, "your prompt has 512 tokens"),
        (600, {"max_tokens": 5}, "your prompt has 601 tokens"),
        (508, {"max_tokens": 4}, "you requested 513 tokens (509 in the prompt, 4 in the completion)"),
        (1, {"max_completion_tokens": 511}, "you requested 513 tokens (2 in the prompt, 511 in the completion)"),
    ],
)
def test_what_does_not_fit_the_context_is_refused_in_openais_words(
    length: int, asked: dict[str, int], words: str, limits: ServerLimits
) -> None:
    with pytest.raises(CapacityError) as caught:
        text(limits, prompt=["a", "x" * length], **asked)
    assert FULL + words in str(caught.value)


def test_echo_puts_the_prompt_in_front_of_each_choice(limits: ServerLimits) -> None:
    assert text(limits, prompt=["a", "b"], n=2, echo=True).echoes == ("a", "a", "b", "b")
    assert text(limits, prompt=[BOS, 104, 105], echo=True).echoes == ("hi",)
    assert text(limits, echo=False).echoes == ()
    assert refused(text, limits, prompt=[10**30], echo=True).param == "prompt"


@pytest.mark.parametrize("written", ["", "<bos>"], ids=["by the tokenizer", "by the template"])
def test_bos_stands_once_whoever_writes_it(written: str, limits: ServerLimits) -> None:
    ask = read_chat({"model": "m", "messages": HELLO}, ByteTokenizer(), PlainChat(written), limits)
    assert ask.samples[0].prompt_ids == [BOS, *b"<user>hello\n<assistant>"]
    assert text(limits).samples[0].prompt_ids == [BOS, *b"hello"]


PROMPTS: list[tuple[Any, list[list[int]]]] = [
    ("ab", [[BOS, 97, 98]]),
    ("", [[BOS]]),
    (["a", "b"], [[BOS, 97], [BOS, 98]]),
    ([97, 98], [[97, 98]]),
    ([[97], [98, 99]], [[97], [98, 99]]),
    ("😀", [[BOS, *"😀".encode()]]),
]


@pytest.mark.parametrize(("prompt", "ids"), PROMPTS, ids=repr)
def test_the_four_kinds_of_prompt(prompt: Any, ids: list[list[int]], limits: ServerLimits) -> None:
    ask = text(limits, prompt=prompt)
    assert [sample.prompt_ids for sample in ask.samples] == ids
    assert ask.prompt_tokens == sum(map(len, ids))


@pytest.mark.parametrize(
    "prompt",
    [None, [], 3, {"a": 1}, ["a", 1], [1, "a"], [[1], 2], [True], [[1.0]], "\ud83d", ["a"] * 17],
    ids=repr,
)  # fmt: skip
def test_bad_prompts_are_refused(prompt: Any, limits: ServerLimits) -> None:
    assert refused(text, limits, prompt=prompt).param == "prompt"


def test_choices_of_several_prompts_are_numbered_and_seeded_alike(limits: ServerLimits) -> None:
    ask = text(limits, prompt=["a", "b"], n=3, seed=2**64 - 2)
    assert [sample.index for sample in ask.samples] == list(range(6))
    assert [sample.prompt_ids[-1] for sample in ask.samples] == [97] * 3 + [98] * 3
    seeds = [sample.params.seed for sample in ask.samples]
    assert seeds[:3] == seeds[3:] == [2**64 - 2, 2**64 - 1, 0]  # prompt b gets what it would get alone
    assert [sample.params.seed for sample in text(limits, n=2).samples] == [None, None]
    assert refused(text, limits, prompt=["a", "b"], n=9).param == "n"


def test_a_template_that_refuses_the_chat_is_the_requests_fault(limits: ServerLimits) -> None:
    class Strict(PlainChat):
        def render(self, messages: list[dict[str, str]]) -> str:
            raise TokenizerError("two user messages in a row", "alternating roles", "merge them")

    with pytest.raises(RequestError, match="two user messages") as caught:
        read_chat({"model": "m", "messages": HELLO}, ByteTokenizer(), Strict(), limits)
    assert caught.value.param == "messages"


def test_a_model_without_a_template_has_no_chat(limits: ServerLimits) -> None:
    with pytest.raises(RequestError, match="/v1/completions") as caught:
        read_chat({"model": "m", "messages": HELLO}, ByteTokenizer(), None, limits)
    assert caught.value.param == "messages"

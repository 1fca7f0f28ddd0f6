"""Parameters that are not offered: values that ask for nothing pass, the others are refused by name, all at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
from scripted_engine import ByteTokenizer, PlainChat

from flexspec.runtime.server.bodies.neutral import (
    CHAT_NEUTRAL,
    MESSAGE_NEUTRAL,
    PART_NEUTRAL,
    RESPONSES_NEUTRAL,
    TEXT_NEUTRAL,
    TOOL_CALL_NEUTRAL,
)
from flexspec.runtime.server.bodies.refusals import UnsupportedError
from flexspec.runtime.server.requests import ChatBody, CompletionBody, ServerLimits, read_chat, read_completion
from flexspec.runtime.server.responses import ResponsesBody
from repository import ROOT

HELLO = [{"role": "user", "content": "hello"}]
LIMITS = ServerLimits(context_tokens=512)


def chat(**body: Any) -> Any:
    return read_chat({"model": "m", "messages": HELLO, **body}, ByteTokenizer(), PlainChat(), LIMITS)


def text(**body: Any) -> Any:
    return read_completion({"model": "m", "prompt": "hello", **body}, ByteTokenizer(), LIMITS)


def refused(call: Any, **body: Any) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        call(**body)
    return caught.value


BOTH: list[dict[str, Any]] = [
    {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0},
    {"top_k": -1, "min_p": 0.0, "best_of": 1, "stop_token_ids": [], "skip_special_tokens": True},
    {"n": 2, "best_of": 2},
    {"logprobs": False, "logit_bias": {}, "response_format": {"type": "text"}, "stream_options": {}},
    {"stream_options": {"include_usage": None, "include_obfuscation": False, "something": None}},
    {"max_completion_tokens": 5, "min_tokens": 0, "use_beam_search": False, "store": False},
    {"service_tier": "auto", "metadata": {"run": "7"}, "prompt_cache_key": "k", "safety_identifier": "u1"},
    {"prompt_cache_retention": "24h", "cache_prompt": True, "user": "someone", "a_name_of_tomorrow": None},
]
CHATS: list[dict[str, Any]] = [
    {"top_logprobs": 0, "reasoning_effort": "none", "verbosity": "medium", "chat_template_kwargs": {}},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "functions": [], "function_call": "none"},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    {"modalities": ["text"], "prediction": {"type": "content", "content": "x"}, "continue_final_message": False},
]
TEXTS: list[dict[str, Any]] = [{"echo": False, "suffix": ""}, {"add_special_tokens": True, "suffix": None}]


def shown(value: object) -> str:
    """A test's id, the same in every process: the text of a function holds its address."""
    return str(getattr(value, "__name__", value))


@pytest.mark.parametrize(
    ("call", "body"), [(c, b) for c, all_ in ((chat, BOTH + CHATS), (text, BOTH + TEXTS)) for b in all_], ids=shown
)
def test_values_that_ask_for_nothing_change_nothing(call: Any, body: dict[str, Any]) -> None:
    plain = call(**{key: body[key] for key in ("n", "max_completion_tokens") if key in body})
    assert call(**body) == plain


ASKING: list[dict[str, Any]] = [
    {"logprobs": 0}, {"logprobs": True}, {"logit_bias": {"5": 1}}, {"frequency_penalty": 0.1}, {"best_of": 2},
    {"repetition_penalty": 1.1}, {"stop_token_ids": [3]}, {"store": True}, {"service_tier": "flex"}, {"temprature": 1},
    {"min_tokens": False}, {"metadata": "x"}, {"frequency_penalty": False},
    {"response_format": {"type": "json_object"}}, {"guided_json": {}}, {"guided_json": "{}"},
    {"skip_special_tokens": False},
]  # fmt: skip
ASKING_CHAT: list[dict[str, Any]] = [
    {"reasoning_effort": "low"}, {"top_logprobs": 2}, {"tools": [{"type": "function"}]}, {"tool_choice": "required"},
    {"functions": [{"name": "f"}]}, {"audio": {}}, {"verbosity": "low"}, {"chat_template_kwargs": {"x": 1}},
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "body"),
    [(c, b) for c, all_ in ((chat, ASKING + ASKING_CHAT), (text, [*ASKING, {"suffix": "x"}])) for b in all_],
    ids=shown,
)
def test_values_that_ask_for_something_are_refused_by_name(call: Any, body: dict[str, Any]) -> None:
    (name,) = body
    error = refused(call, **body)
    assert error.param == name
    assert error.counted == ("unknown" if name == "temprature" else name,)


def test_tools_need_more_than_auto() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": None}):
        assert refused(chat, tools=tools, **choice).counted == ("tools",)


def test_all_that_is_refused_is_named_at_once() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "x", "audio": {"id": "a"}, "mood": 1}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "x", "bold": 1}]}]
    asked = {"tools": [{}], "tool_choice": "required", "logprobs": True, "temprature": 1}
    error = refused(chat, messages=messages + parts, stream_options={"other": 1}, **asked)
    names = [*asked, "stream_options.other", "messages[1].audio", "messages[1].mood", "messages[2].content[0].bold"]
    assert all(name in str(error) for name in names)
    assert set(error.counted) == {
        "tools", "tool_choice", "logprobs", "unknown", "stream_options.unknown", "messages.audio", "messages.unknown",
        "messages.content.unknown",
    }  # fmt: skip
    many = refused(chat, **{f"unknown_{number}": "x" * 10**6 for number in range(1000)}, **{"k" * 10**6: 1})
    assert "and 985 more" in str(many) and len(str(many)) < 4000


def test_the_page_lists_every_parameter() -> None:
    page = set(re.findall(r"`([a-z_.]+)(?=[`:])", (ROOT / "docs/http.md").read_text()))
    bodies = {*ChatBody.model_fields, *CompletionBody.model_fields, *ResponsesBody.model_fields}
    known = {
        *CHAT_NEUTRAL,
        *TEXT_NEUTRAL,
        *RESPONSES_NEUTRAL,
        *MESSAGE_NEUTRAL,
        *PART_NEUTRAL,
        *TOOL_CALL_NEUTRAL,
        *bodies,
    } - {"stream_options"}
    assert known <= page

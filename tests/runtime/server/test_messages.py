"""Chat messages as clients send and replay them."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_engine import ByteTokenizer, PlainChat

from flexspec.errors import RequestError
from flexspec.runtime.server.bodies.messages import parse_messages, spell_tool_turns
from flexspec.runtime.server.requests import ServerLimits, read_chat
from flexspec.runtime.text.chat import ChatRenderer

HELLO = {"role": "user", "content": "hello"}
LIMITS = ServerLimits(context_tokens=512)
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def prompt(*messages: dict[str, Any], template: Any = None) -> str:
    ask = read_chat({"model": "m", "messages": list(messages)}, ByteTokenizer(), template or PlainChat(), LIMITS)
    return bytes(ask.samples[0].prompt_ids[1:]).decode()


def test_a_developer_is_the_templates_system() -> None:
    brief = {"content": "Be brief."}
    assert prompt({"role": "developer", **brief}, HELLO) == prompt({"role": "system", **brief}, HELLO)


@pytest.mark.parametrize(
    "turn",
    [{"content": ""}, {"content": None}, {}, {"content": []}, {"content": None, "tool_calls": None, "audio": None}],
    ids=str,
)
def test_an_assistants_turn_without_text_is_empty(turn: dict[str, Any]) -> None:
    assert prompt(HELLO, {"role": "assistant", **turn}, HELLO) == ("<user>hello\n<assistant>\n<user>hello\n<assistant>")


def test_what_answers_carry_comes_back() -> None:
    back = {"role": "assistant", "content": "yes", "refusal": None, "annotations": [], "audio": None, "id": "x"}
    assert prompt(HELLO, back) == prompt(HELLO, {"role": "assistant", "content": "yes"})
    said = {"role": "assistant", "content": None, "refusal": "no"}
    assert prompt(HELLO, said) == prompt(HELLO, {"role": "assistant", "content": "no"})


def test_text_parts_are_joined_and_their_hints_let_through() -> None:
    parts = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}]
    assert prompt({"role": "system", "content": parts}) == "<system>one\ntwo\n<assistant>"


def test_names_go_to_the_template() -> None:
    template = ChatRenderer("{% for m in messages %}{{ m.name }}:{{ m.content }};{% endfor %}", {})
    assert prompt({**HELLO, "name": "eve"}, template=template) == "eve:hello;"


def test_tool_turns_go_to_a_template_that_knows_them() -> None:
    written = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments.a + 1 }}{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    )
    wanted = "[user]hello[assistant]add2[tool]2c1"
    assert prompt(HELLO, CALLING, RESULT, template=ChatRenderer(written, {})) == wanted
    legacy = {"role": "assistant", "function_call": CALL["function"]}
    answer = {"role": "function", "name": "add", "content": "2"}
    assert prompt(HELLO, legacy, answer, template=ChatRenderer(written, {})) == wanted.removesuffix("c1")


def test_tool_turns_are_text_where_the_template_does_not_know_them() -> None:
    call = '{"name": "add", "arguments": {"a": 1}}'
    assert prompt(HELLO, CALLING, RESULT) == f"<user>hello\n<assistant>{call}\n<user>2\n<assistant>"
    both = {**CALLING, "content": "I add.", "tool_calls": [CALL, {"function": {"name": "f", "arguments": "not json"}}]}
    (turn,) = spell_tool_turns(parse_messages([both]))
    assert turn == {
        "role": "assistant",
        "content": f'I add.\n{call}\n{{"name": "f", "arguments": "not json"}}',
    }


REFUSED: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hello", "messages"),
    (["hello"], "messages"),
    ([{"role": "banana", "content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([HELLO, {"role": "user"}], "messages[1].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "system", "content": None}], "messages[0].content"),
    ([{"role": "tool", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": "a\ud83d"}], "messages[0].content"),
    ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
    ([{"role": "user", "content": "x", "name": "\ud83d"}], "messages[0].name"),
    ([{"role": "user", "content": "x", "mood": 1}], "messages[0].mood"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}], "messages[0].content[1].type"),
    ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": "x", "bold": 1}]}], "messages[0].content[0].bold"),
    ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": 3}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [3]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": [{"function": None}]}], "messages[0].tool_calls[0].function"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
    ([{"role": "assistant", "function_call": {"name": "f", "arguments": 3}}], "messages[0].function_call.arguments"),
]


@pytest.mark.parametrize(("messages", "param"), REFUSED, ids=repr)
def test_bad_messages_are_refused_by_their_place(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_chat({"model": "m", "messages": messages}, ByteTokenizer(), PlainChat(), LIMITS)
    assert caught.value.param == param

"""/v1/responses, /tokenize, /detokenize and /version."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from http_calls import call, error_of
from scripted_engine import BOS, Script, ScriptedEngine

MakeApp = Callable[[ScriptedEngine], FastAPI]
PATH = "/v1/responses"
ASK = {"model": "tiny/scripted", "input": "go"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "2"}

INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"input": "go"}, "<user>go\n"),
    ({"input": "go", "instructions": "Be brief."}, "<system>Be brief.\n<user>go\n"),
    ({"input": [{"role": "user", "content": "go"}]}, "<user>go\n"),
    ({"input": [{"type": "message", "role": "developer", "content": "x"}]}, "<system>x\n"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]}, "<user>go\n"),
    (
        {"input": [{"type": "message", "id": "m", "status": "completed", "role": "assistant",
                    "content": [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}]}]},
        "<assistant>yes\n",
    ),
    ({"input": [CALL, OUTPUT]}, '<assistant>{"name": "f", "arguments": {}}\n<user>2\n'),
]  # fmt: skip


@pytest.mark.parametrize(("body", "text"), INPUTS, ids=lambda value: str(value)[:60])
def test_inputs_are_chats(body: dict[str, Any], text: str, engine: ScriptedEngine, make_app: MakeApp) -> None:
    answer = call(make_app(engine), "POST", PATH, json={**ASK, **body, "max_output_tokens": 9, "top_k": 3})
    assert answer.status_code == 200
    ((ids, params),) = engine.submitted
    assert bytes(ids[1:]).decode() == f"{text}<assistant>"
    assert (params.max_tokens, params.top_k) == (9, 3)


def test_the_whole_answer(engine: ScriptedEngine, make_app: MakeApp) -> None:
    answer = call(make_app(engine), "POST", PATH, json={**ASK, "metadata": {"a": "b"}, "store": False}).json()
    (item,) = answer["output"]
    assert (answer["object"], answer["status"], answer["metadata"]) == ("response", "completed", {"a": "b"})
    assert item["content"] == [{"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}]
    assert answer["usage"]["output_tokens"] == 2
    cut = call(make_app(engine), "POST", PATH, json={**ASK, "max_output_tokens": 1}).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def events(body: bytes) -> list[dict[str, Any]]:
    *blocks, rest = body.split(b"\n\n")
    assert rest == b""
    parsed = []
    for block in blocks:
        name, data = block.split(b"\n")
        parsed.append(json.loads(data.removeprefix(b"data: ")))
        assert name.removeprefix(b"event: ").decode() == parsed[-1]["type"]
    assert [each["sequence_number"] for each in parsed] == list(range(len(parsed)))
    return parsed


def test_the_events_of_a_stream(engine: ScriptedEngine, make_app: MakeApp) -> None:
    parsed = events(call(make_app(engine), "POST", PATH, json={**ASK, "stream": True}).content)
    kinds = [each["type"].removeprefix("response.") for each in parsed if "delta" not in each["type"]]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(each["delta"] for each in parsed if "delta" in each["type"]) == "Hello world"
    final = parsed[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == "Hello world" and final["usage"]["output_tokens"] == 2
    engine.script = Script(("half",), "error", "rank 1 is gone")
    *_, last = events(call(make_app(engine), "POST", PATH, json={**ASK, "stream": True}).content)
    assert last["type"] == "response.failed" and last["response"]["error"]["message"] == "rank 1 is gone"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [3]}, "input"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
    ({"previous_response_id": "x"}, "previous_response_id"),
    ({"store": True}, "store"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"text": {"format": {"type": "json_object"}}}, "text"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"n": 2}, "n"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"instructions": 3}, "instructions"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=str)
def test_what_is_refused(body: dict[str, Any], param: str, engine: ScriptedEngine, make_app: MakeApp) -> None:
    answer = call(make_app(engine), "POST", PATH, json={**ASK, **body})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


NEUTRAL: list[dict[str, Any]] = [
    {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "reasoning": {"effort": None, "summary": None}},
    {"include": ["reasoning.encrypted_content"], "tools": [], "tool_choice": "auto", "truncation": "disabled"},
    {"stream_options": {"include_obfuscation": False}, "background": False, "previous_response_id": None},
]


@pytest.mark.parametrize("body", NEUTRAL, ids=str)
def test_what_asks_for_nothing(body: dict[str, Any], engine: ScriptedEngine, make_app: MakeApp) -> None:
    assert call(make_app(engine), "POST", PATH, json={**ASK, **body}).status_code == 200


def test_tokens_of_a_prompt_and_back(engine: ScriptedEngine, make_app: MakeApp) -> None:
    app = make_app(engine)
    answer = call(app, "POST", "/tokenize", json={"model": "tiny/scripted", "prompt": "hé"}).json()
    assert answer == {"count": 4, "max_model_len": 2 * 10**6, "tokens": [BOS, *"hé".encode()]}
    bare = call(app, "POST", "/tokenize", json={"prompt": "h", "add_special_tokens": False}).json()
    assert bare["tokens"] == [104]
    chat = call(app, "POST", "/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert bytes(chat["tokens"][1:]) == b"<user>x\n<assistant>"
    assert call(app, "POST", "/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hé"}
    assert call(app, "POST", "/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "\ud83d"}, "prompt"),
        ("/tokenize", {"prompt": "x", "other": 1}, "other"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ]
    for path, body, param in bad:
        refused = call(app, "POST", path, content=json.dumps(body))
        assert (refused.status_code, error_of(refused)["param"]) == (400, param)
    assert call(app, "GET", "/version").json()["version"]

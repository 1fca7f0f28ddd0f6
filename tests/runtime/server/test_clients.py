"""Requests in the shapes that usual clients send, and bodies of known names with odd values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from http_calls import call
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from scripted_engine import ByteTokenizer, PlainChat, ScriptedEngine

from flexspec.runtime.server.app import create_app
from flexspec.runtime.server.bodies.neutral import CHAT_NEUTRAL, MESSAGE_NEUTRAL, RESPONSES_NEUTRAL, TEXT_NEUTRAL
from flexspec.runtime.server.metrics import Metrics
from flexspec.runtime.server.requests import ChatBody, CompletionBody, ServerLimits
from flexspec.runtime.server.responses import ResponsesBody

REQUESTS = json.loads((Path(__file__).parent / "client_requests.json").read_text())


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda item: item["client"])
def test_requests_of_usual_clients(
    request_: dict[str, Any], engine: ScriptedEngine, make_app: Callable[[ScriptedEngine], FastAPI]
) -> None:
    body = request_["body"]
    answer = call(make_app(engine), "POST", request_["path"], json=body, headers=request_.get("headers"))
    assert answer.status_code == 200, answer.text
    assert b"Hello" in answer.content
    if not body.get("stream"):
        assert answer.json()["usage"]
    elif "responses" in request_["path"]:
        assert b"event: response.completed" in answer.content
    else:
        assert answer.content.endswith(b"data: [DONE]\n\n")
    if body.get("stream_options", {}).get("continuous_usage_stats"):
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 2
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    engine = ScriptedEngine()
    limits = ServerLimits(context_tokens=512, max_choices=16, max_body_bytes=100_000)
    yield create_app(engine, ByteTokenizer(), PlainChat(), "tiny/scripted", Metrics(CollectorRegistry()), limits)
    engine.close()


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**63, 2**64, 10**30])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "none", "text", "user", "assistant", "tool", "function", "message", "\ud83d", "\x00"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "name", "arguments", "function", "include_usage"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
CALLS = st.lists(
    st.fixed_dictionaries({}, optional={key: ODD for key in ("id", "type", "function", "index", "odd")}), max_size=2
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]) | ODD},
        optional={
            "content": st.text(max_size=5) | ODD,
            "tool_calls": CALLS | ODD,
            "function_call": ODD,
            "refusal": ODD,
            "name": ODD,
            **{key: ODD for key in MESSAGE_NEUTRAL},
        },
    ),
    max_size=3,
)


def bodies(names: set[str], required: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Required parameters, mostly right, and up to four others with odd values."""
    others = st.dictionaries(st.sampled_from(sorted(names)) | st.text(max_size=5), ODD, max_size=4)
    right = st.fixed_dictionaries({"model": st.just("tiny/scripted"), **required})
    return st.builds(lambda one, two: {**one, **two}, right, others)


ASKS = st.one_of(
    st.tuples(st.just("/v1/chat/completions"), bodies({*ChatBody.model_fields, *CHAT_NEUTRAL}, {"messages": MESSAGES})),
    st.tuples(
        st.just("/v1/completions"),
        bodies({*CompletionBody.model_fields, *TEXT_NEUTRAL}, {"prompt": st.just("x") | ODD}),
    ),
    st.tuples(
        st.just("/v1/responses"),
        bodies({*ResponsesBody.model_fields, *RESPONSES_NEUTRAL}, {"input": st.just("x") | MESSAGES | ODD}),
    ),
    st.tuples(st.just("/tokenize"), bodies({"prompt", "add_special_tokens"}, {"messages": MESSAGES})),
    st.tuples(st.just("/detokenize"), bodies({"model"}, {"tokens": st.lists(st.integers(-1, 300), max_size=3) | ODD})),
)


@pytest.mark.slow(reason="500 requests")
@settings(max_examples=500)
@given(ASKS)
def test_no_body_breaks_the_server(app: FastAPI, ask: tuple[str, dict[str, Any]]) -> None:
    path, body = ask
    answer = call(app, "POST", path, content=json.dumps(body).encode())
    assert answer.status_code in (200, 400, 404), (answer.text, body)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and error["code"] and len(answer.content) < 10_000

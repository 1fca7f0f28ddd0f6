"""Statuses, error bodies, models, health and metrics, without sockets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from http_calls import ASK, CHAT, TEXT, call, error_of
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedEngine

from flexspec.errors import CapacityError, EngineError, QueueFullError, RequestError, WeightError
from flexspec.runtime.server.requests import ServerLimits
from flexspec.sampling import SamplingParams

MakeApp = Callable[[ScriptedEngine], FastAPI]


def test_a_completion_has_openais_shape(engine: ScriptedEngine, make_app: MakeApp) -> None:
    answer = call(make_app(engine), "POST", TEXT, json=ASK).json()
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert answer["model"] == "tiny/scripted"
    assert answer["choices"] == [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["total_tokens"] == 3 + 2


def test_a_chat_answer_has_openais_shape(engine: ScriptedEngine, make_app: MakeApp) -> None:
    request = {"model": "tiny/scripted", "messages": [{"role": "user", "content": "go"}], "max_tokens": 1}
    answer = call(make_app(engine), "POST", CHAT, json=request).json()
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"]["flexspec"]["tokens_per_round"] is None  # one token, from the prefill


@pytest.mark.parametrize("prompt", [[[]], [[97], []], [-1], [257], [10**30]], ids=repr)
def test_token_ids_are_the_engines_to_check(engine: ScriptedEngine, make_app: MakeApp, prompt: Any) -> None:
    """Whatever was submitted before the bad one is cancelled."""
    answer = call(make_app(engine), "POST", TEXT, json={**ASK, "prompt": prompt})
    assert answer.status_code == 400
    assert (error_of(answer)["param"], error_of(answer)["code"]) == ("prompt", "invalid_value")
    engine.wait_until(engine.idle)
    assert len(engine.cancelled) == len(engine.submitted)


def test_the_choices_of_a_request_are_a_group_of_their_own(engine: ScriptedEngine, make_app: MakeApp) -> None:
    app = make_app(engine)
    for body in ({**ASK, "n": 2}, {**ASK, "prompt": ["a", "b"]}):
        assert call(app, "POST", TEXT, json=body).status_code == 200
    first, second, third, fourth = engine.groups
    assert first is second and third is fourth and first is not third and first is not None


def test_a_chat_that_the_engine_refuses_names_its_messages(engine: ScriptedEngine, make_app: MakeApp) -> None:
    engine.refusal = RequestError("x", "y", "z", param="prompt")
    body = {"model": "tiny/scripted", "messages": [{"role": "user", "content": "go"}]}
    answer = call(make_app(engine), "POST", CHAT, json=body)
    assert answer.status_code == 400 and error_of(answer)["param"] == "messages"


REFUSALS: list[tuple[Exception, int, str | None, str]] = [
    (RequestError("x", "y", "z", param="prompt"), 400, "prompt", "invalid_value"),
    (CapacityError("900 tokens", "at most 512", "shorten it"), 400, "prompt", "context_length_exceeded"),
    (QueueFullError("8 waiting", "fewer", "come again", retry_after_s=7), 503, None, "queue_full"),
    (EngineError("rank 1 is gone", "all ranks", "restart"), 503, None, "engine_failed"),
    (WeightError("x", "y", "z"), 500, None, "FS202"),
    (KeyError("secret"), 500, None, "internal_error"),
]


@pytest.mark.parametrize(("refusal", "status", "param", "code"), REFUSALS, ids=lambda value: type(value).__name__)
def test_errors_of_submit(
    refusal: Exception, status: int, param: str | None, code: str, engine: ScriptedEngine, make_app: MakeApp
) -> None:
    engine.refusal = refusal
    response = call(make_app(engine), "POST", TEXT, json={**ASK, "stream": True})
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)
    assert response.headers.get("retry-after") == ("7" if code == "queue_full" else None)
    assert error["type"] == ("invalid_request_error" if status == 400 else "server_error")
    assert "secret" not in error["message"]


def test_a_chat_that_can_never_fit_blames_its_messages(engine: ScriptedEngine, make_app: MakeApp) -> None:
    engine.refusal = CapacityError("900 tokens", "at most 512", "shorten it")
    request = {"model": "tiny/scripted", "messages": [{"role": "user", "content": "go"}]}
    assert error_of(call(make_app(engine), "POST", CHAT, json=request))["param"] == "messages"


BAD_BODIES: list[bytes] = [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe{", b"[" * 50_000, b"1" * 5000]


@pytest.mark.parametrize("data", BAD_BODIES, ids=lambda data: repr(data[:8]))
def test_bodies_that_are_no_json_objects(data: bytes, engine: ScriptedEngine, make_app: MakeApp) -> None:
    response = call(make_app(engine), "POST", TEXT, content=data)
    assert response.status_code == 400 and error_of(response)["code"] == "invalid_value"


def test_a_body_too_large_is_refused(engine: ScriptedEngine, make_app: MakeApp, limits: ServerLimits) -> None:
    response = call(make_app(engine), "POST", TEXT, content=b" " * (limits.max_body_bytes + 1))
    assert response.status_code == 413 and error_of(response)["code"] == "body_too_large"


def test_unknown_urls_methods_and_models(engine: ScriptedEngine, make_app: MakeApp) -> None:
    app = make_app(engine)
    assert error_of(call(app, "POST", "/v1/embeddings"))["code"] == "unknown_url"
    assert call(app, "GET", TEXT).status_code == 405
    for response in (
        call(app, "POST", TEXT, json={**ASK, "model": "gpt-9"}),
        call(app, "GET", "/v1/models/gpt-9"),
    ):
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found" and "tiny/scripted" in error_of(response)["message"]
    response = call(app, "POST", TEXT, json={"prompt": "go"})
    assert response.status_code == 400 and error_of(response)["param"] == "model"


def test_the_model_list_and_the_schema(engine: ScriptedEngine, make_app: MakeApp) -> None:
    app = make_app(engine)
    (card,) = call(app, "GET", "/v1/models").json()["data"]
    assert card["id"] == "tiny/scripted"
    assert call(app, "GET", "/v1/models/tiny/scripted").json() == card
    schema = call(app, "GET", "/openapi.json").json()
    body = schema["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "max_completion_tokens"} <= set(body["properties"])
    (reference,) = re.findall(r'"\$ref": "(#[^"]*StreamOptions)"', json.dumps(body))
    found: Any = schema
    for key in reference.split("/")[1:]:
        found = found[key]
    assert "include_usage" in found["properties"]


def test_health_follows_the_engine(
    engine: ScriptedEngine, gated_engine: ScriptedEngine, make_app: MakeApp, limits: ServerLimits
) -> None:
    idle = call(make_app(engine), "GET", "/health")
    assert idle.status_code == 200
    assert idle.json() == {"status": "ok", "last_step_age_s": 0.25, "running": 0, "queued": 0}
    engine.step_age_s = limits.stall_s + 1
    assert call(make_app(engine), "GET", "/health").status_code == 200  # nothing to do is no stall

    app = make_app(gated_engine)
    gated_engine.submit([1], SamplingParams(), lambda delta: None)
    assert call(app, "GET", "/health").json()["running"] == 1
    gated_engine.step_age_s = limits.stall_s + 1
    stalled = call(app, "GET", "/health")
    assert (stalled.status_code, stalled.json()["status"]) == (503, "stalled")
    gated_engine.failure = "rank 1 is gone"
    failed = call(app, "GET", "/health")
    assert (failed.status_code, failed.json()["failure"]) == (503, "rank 1 is gone")


def test_nothing_is_taken_while_stopping(engine: ScriptedEngine, make_app: MakeApp) -> None:
    app = make_app(engine)
    app.state.drain.begin()
    response = call(app, "POST", TEXT, json=ASK)
    assert (response.status_code, error_of(response)["code"]) == (503, "shutting_down")
    assert engine.submitted == []
    health = call(app, "GET", "/health")
    assert (health.status_code, health.json()["status"]) == (503, "stopping")


def test_metrics_are_served_with_the_load_of_now(gated_engine: ScriptedEngine, make_app: MakeApp) -> None:
    app = make_app(gated_engine)
    gated_engine.submit([1], SamplingParams(), lambda delta: None)
    call(app, "POST", TEXT, json={**ASK, "logprobs": 1})
    response = call(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert values["flexspec_requests_running",] == 1
    assert values["flexspec_requests_refused_total", "unsupported_parameter", "400"] == 1
    assert values["flexspec_parameters_refused_total", "logprobs"] == 1

"""What requests pass before the application: ids, origins, keys, HEAD, paths, compressed bodies, the log."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from http_calls import ASK, CHAT, TEXT, call, error_of
from scripted_engine import ByteTokenizer, PlainChat, ScriptedEngine

from flexspec.runtime.server.app import create_app
from flexspec.runtime.server.door import DoorOptions, key_digest
from flexspec.runtime.server.metrics import Metrics
from flexspec.runtime.server.requests import ServerLimits

MakeApp = Callable[[ScriptedEngine], FastAPI]
PAGE = {"Origin": "http://localhost:3000"}


@pytest.fixture
def behind(engine: ScriptedEngine, metrics: Metrics, limits: ServerLimits) -> Callable[..., FastAPI]:
    def make(**options: Any) -> FastAPI:
        door = DoorOptions(**{"max_body_bytes": limits.max_body_bytes, **options})
        return create_app(engine, ByteTokenizer(), PlainChat(), "tiny/scripted", metrics, limits, door)

    return make


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/version"])
def test_head_is_get_without_a_body(path: str, engine: ScriptedEngine, make_app: MakeApp) -> None:
    app = make_app(engine)
    head, get = call(app, "HEAD", path), call(app, "GET", path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    engine.failure = "gone"
    assert call(app, "HEAD", "/health").status_code == 503


def test_request_ids_come_back(engine: ScriptedEngine, make_app: MakeApp) -> None:
    app = make_app(engine)
    assert call(app, "POST", TEXT, json=ASK, headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {call(app, "GET", "/nowhere").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert call(app, "GET", "/health", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"
    engine.refusal = KeyError("x")
    assert call(app, "POST", TEXT, json=ASK, headers={"x-request-id": "abc-2"}).headers["x-request-id"] == "abc-2"


@pytest.mark.parametrize(
    "headers",
    [PAGE, {"Origin": "null"}, {"sec-fetch-site": "cross-site", "content-type": "text/plain"}],
    ids=str,
)
def test_pages_are_refused_by_default(headers: dict[str, str], engine: ScriptedEngine, behind: Any) -> None:
    app = behind()
    body = json.dumps(ASK).encode()
    answer = call(app, "POST", TEXT, content=body, headers=headers)
    assert (answer.status_code, error_of(answer)["code"]) == (403, "origin_not_allowed")
    assert call(app, "OPTIONS", TEXT, headers={**PAGE, "Access-Control-Request-Method": "POST"}).status_code == 403
    assert call(app, "GET", "/health", headers=headers).status_code == 200
    assert engine.submitted == []
    assert call(app, "POST", TEXT, content=body, headers={"content-type": "text/plain"}).status_code == 200  # no page


@pytest.mark.parametrize("origins", [("http://localhost:3000",), ("*",)], ids=str)
def test_pages_of_named_origins_are_let_in(origins: tuple[str, ...], engine: ScriptedEngine, behind: Any) -> None:
    app = behind(origins=origins, key_digests=(key_digest("k"),))
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = call(app, "OPTIONS", CHAT, headers={**PAGE, **asked})  # carries no key
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == PAGE["Origin"]
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    keyed = {**PAGE, "Authorization": "Bearer k"}
    for body, status in ((ASK, 200), ({**ASK, "stream": True}, 200), ({**ASK, "nonsense": 1}, 400)):
        answer = call(app, "POST", TEXT, json=body, headers=keyed)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE["Origin"])
        assert "Origin" in answer.headers["vary"]
    answer = call(app, "POST", TEXT, content=json.dumps(ASK), headers={**keyed, "content-type": "text/plain"})
    assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
    if "*" not in origins:
        assert call(app, "GET", "/v1/models", headers={"Origin": "http://evil.example"}).status_code == 403


def test_options_without_an_origin(behind: Any) -> None:
    answer = call(behind(), "OPTIONS", TEXT)
    assert answer.status_code == 204 and "POST" in answer.headers["allow"]


def test_keys(behind: Any, engine: ScriptedEngine) -> None:
    app = behind(key_digests=(key_digest("first"), key_digest("sécond")))
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "first"},
        {"Authorization": "Basic first"},
    ):
        for method, path in (("POST", TEXT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nowhere")):
            answer = call(app, method, path, headers=headers)
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
    assert call(app, "GET", "/health").status_code == 200
    assert call(app, "POST", TEXT, json=ASK, headers={"Authorization": "Bearer first"}).status_code == 200
    assert call(app, "GET", "/v1/models", headers={"x-api-key": "first"}).status_code == 200
    spelt = {b"authorization": "Bearer sécond".encode()}
    assert call(app, "GET", "/v1/models", headers=spelt).status_code == 200


def test_a_path_in_front(behind: Any) -> None:
    app = behind(root_path="/llm")
    for path in ("/llm/v1/models", "/v1/models"):  # whether or not the proxy takes it off
        assert call(app, "GET", path).status_code == 200
    assert call(app, "GET", "/llmx/v1/models").status_code == 404
    assert call(app, "GET", "/openapi.json").json()["servers"] == [{"url": "/llm"}]
    chat = {"model": "tiny/scripted", "messages": [{"role": "user", "content": "x" * 10}], "max_tokens": 10**6 * 2}
    assert error_of(call(app, "POST", "/llm" + CHAT, json=chat))["param"] == "max_tokens"


def deflated(data: bytes) -> bytes:
    return zlib.compress(data)


@pytest.mark.parametrize(("name", "squeeze"), [("gzip", gzip.compress), ("deflate", deflated), ("identity", bytes)])
def test_compressed_bodies(name: str, squeeze: Callable[[bytes], bytes], engine: ScriptedEngine, behind: Any) -> None:
    body = json.dumps({**ASK, "prompt": "go " * 20_000}).encode()
    answer = call(behind(), "POST", TEXT, content=squeeze(body), headers={"content-encoding": name})
    assert answer.status_code == 200
    ((ids, _),) = engine.submitted
    assert len(ids) == 60_001


@pytest.mark.parametrize(
    ("data", "name", "status", "code"),
    [
        (gzip.compress(b" " * 10**8), "gzip", 413, "body_too_large"),
        (b"no gzip", "gzip", 400, "invalid_value"),
        (gzip.compress(b'{"model": 1}' * 1000)[:-20], "gzip", 400, "invalid_value"),
        (b"", "gzip", 400, "invalid_value"),
        (b"{}", "br", 415, "unsupported_media_type"),
    ],
    ids=["bomb", "not gzip", "cut", "empty", "other"],
)
def test_bodies_that_cannot_be_inflated(data: bytes, name: str, status: int, code: str, behind: Any) -> None:
    answer = call(behind(), "POST", TEXT, content=data, headers={"content-encoding": name})
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


def test_the_access_log_has_a_line_a_request(behind: Any, engine: ScriptedEngine) -> None:
    lines: list[dict[str, Any]] = []
    app = behind(access_log=lines.append)
    whole = call(app, "POST", TEXT, json=ASK, headers={"x-request-id": "one"})
    call(app, "POST", TEXT, json={**ASK, "nonsense": 1})
    call(app, "GET", "/v1/models", headers=PAGE)
    engine.refusal = KeyError("x")
    call(app, "POST", TEXT, json=ASK)
    assert [line["status"] for line in lines] == [200, 400, 403, 500]
    first = lines[0]
    assert (first["request_id"], first["method"], first["path"]) == ("one", "POST", TEXT)
    assert first["sent_bytes"] == len(whole.content) and first["duration_ms"] > 0
    assert json.loads(json.dumps(lines)) == lines


def test_a_refused_visit_is_counted(behind: Any) -> None:
    app = behind(key_digests=(key_digest("k"),))
    call(app, "GET", "/v1/models")
    text = call(app, "GET", "/metrics", headers={"Authorization": "Bearer k"}).text
    assert 'flexspec_requests_refused_total{code="invalid_api_key",status="401"} 1.0' in text

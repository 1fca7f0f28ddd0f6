"""Raw sockets: clients that end their side after asking, those that leave, and what is no HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from flexspec.runtime.server.requests import ServerLimits


def ask(port: int, version: str = "1.1", **more: Any) -> socket.socket:
    body = json.dumps({"model": "tiny/scripted", "prompt": "go", **more}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return send(port, head.encode() + body)


def send(port: int, data: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), 10)
    client.sendall(data)
    return client


def rest(client: socket.socket) -> bytes:
    with client, client.makefile("rb") as stream:
        return stream.read()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_gets_its_answer(
    stream: bool, version: str, engine: ScriptedEngine, start: Callable[..., Any]
) -> None:
    client = ask(start(engine).port, version, stream=stream)
    client.shutdown(socket.SHUT_WR)
    answer = rest(client)  # the server closes: no further request can come
    assert answer.startswith(b"HTTP/1.1 200") and b" world" in answer
    assert answer.endswith(b"}") or b"data: [DONE]\n\n" in answer


def test_an_answer_that_takes_long_is_whole_behind_its_interim_answers(
    gated_engine: ScriptedEngine, start: Callable[..., Any]
) -> None:
    client = ask(start(gated_engine).port)
    client.shutdown(socket.SHUT_WR)
    with client, client.makefile("rb") as answer:
        assert answer.readline() == b"HTTP/1.1 100 Continue\r\n"
        gated_engine.allow(10)
        assert b"HTTP/1.1 200 OK" in answer.read()


def test_comments_keep_a_stream_whole(gated_engine: ScriptedEngine, start: Callable[..., Any]) -> None:
    client = ask(start(gated_engine).port, stream=True)
    client.shutdown(socket.SHUT_WR)
    with client, client.makefile("rb") as answer:
        while answer.readline() != b":\n":
            pass
        gated_engine.allow(10)
        text = answer.read()
    assert b"Hello" in text and b"data: [DONE]\n\n" in text


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"], ids=["sent", "announced"])
def test_a_body_too_large_is_answered(
    expect: str, engine: ScriptedEngine, start: Callable[..., Any], limits: ServerLimits
) -> None:
    length = 4 * limits.max_body_bytes
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n{expect}\r\n".encode()
    answer = rest(send(start(engine).port, head + (b"" if expect else b" " * length)))
    assert answer.startswith(b"HTTP/1.1 413") and b"body_too_large" in answer


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_gets_of_such_clients(path: str, engine: ScriptedEngine, start: Callable[..., Any]) -> None:
    client = send(start(engine).port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    client.shutdown(socket.SHUT_WR)
    assert rest(client).startswith(b"HTTP/1.1 200")


def test_a_client_that_ends_within_its_request_is_left(engine: ScriptedEngine, start: Callable[..., Any]) -> None:
    client = send(start(engine).port, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    client.shutdown(socket.SHUT_WR)
    assert rest(client) == b""


@pytest.mark.parametrize(
    "data",
    [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n bad\r\n\r\n", b"GET /" + b"x" * 300_000],
    ids=["word", "head", "long"],
)
def test_malformed_http_has_openais_error(data: bytes, engine: ScriptedEngine, start: Callable[..., Any]) -> None:
    head, _, body = rest(send(start(engine).port, data)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "malformed_http"

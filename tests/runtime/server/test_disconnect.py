"""Clients that leave at random moments, over real sockets: every request of theirs is cancelled, nothing is left."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import httpx
from scripted_engine import Script, ScriptedEngine

CLIENTS = 64


def send_request(port: int, stream: bool, choices: int) -> socket.socket:
    body = json.dumps(
        {"model": "tiny/scripted", "prompt": "go", "max_tokens": 10**6, "stream": stream, "n": choices}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    client = socket.create_connection(("127.0.0.1", port), 10)
    client.sendall(head + body)
    return client


def leave(client: socket.socket, abruptly: bool) -> None:
    if abruptly:  # a reset instead of an orderly end
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def visit(port: int, engine: ScriptedEngine, luck: random.Random) -> None:
    stream = luck.random() < 0.6
    client = send_request(port, stream, luck.choice([1, 1, 3]))
    client.settimeout(10)
    if stream:
        for _ in range(luck.randrange(6)):
            engine.allow(1)
            assert client.recv(luck.choice([1, 100, 4096]))
    leave(client, luck.random() < 0.5)


def test_a_storm_of_clients_that_leave(gated_engine: ScriptedEngine, start: Callable[..., Any]) -> None:
    gated_engine.script = Script(["word "] * 10**6)
    running = start(gated_engine)
    visitors = [
        threading.Thread(target=visit, args=(running.port, gated_engine, random.Random(number)))
        for number in range(CLIENTS)
    ]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join(30)
        assert not visitor.is_alive()
    # A client that left before its request was read never asked anything; all that did are cancelled.
    gated_engine.wait_until(lambda: gated_engine.idle() and not running.server.server_state.connections)
    assert len(gated_engine.ended) == len(gated_engine.submitted) >= CLIENTS // 2
    assert set(gated_engine.ended.values()) == {"cancelled"}
    gated_engine.script = Script(("Hello", " world"))
    gated_engine.allow(10)
    answer = httpx.post(running.url + "/v1/completions", json={"model": "tiny/scripted", "prompt": "go"}, timeout=10)
    assert answer.json()["choices"][0]["text"] == "Hello world"
    # The answer is out before its own task has ended; those of the clients that left must not stay either.
    gated_engine.wait_until(lambda: not running.server.server_state.tasks)


def test_a_client_that_waits_in_vain_is_cancelled_when_it_leaves(
    gated_engine: ScriptedEngine, start: Callable[..., Any]
) -> None:
    running = start(gated_engine)
    for stream in (False, True):
        client = send_request(running.port, stream, 1)
        gated_engine.wait_until(lambda: not gated_engine.idle())
        leave(client, abruptly=False)
        gated_engine.wait_until(gated_engine.idle)
    assert list(gated_engine.ended.values()) == ["cancelled", "cancelled"]


def test_a_reader_that_never_reads_is_cancelled_when_it_leaves(
    gated_engine: ScriptedEngine, start: Callable[..., Any]
) -> None:
    gated_engine.script = Script(["x" * 2000] * 10**6)
    running = start(gated_engine)
    client = send_request(running.port, True, 1)
    # The engine goes on while nobody reads: 16 MB are more than the sockets and buffers between them hold.
    gated_engine.allow(8000)
    gated_engine.wait_until(lambda: any(request.said == 8000 for request in gated_engine._running.values()))
    leave(client, abruptly=True)
    gated_engine.wait_until(gated_engine.idle)
    assert gated_engine.ended == {1: "cancelled"}

"""The port, signals, grace period and exit codes; no thread and no stream is left behind."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi_driver import events_of, finishes_of, text_of
from scripted_engine import Script, ScriptedEngine

from flexspec.errors import PortError
from flexspec.runtime.server.listen import reserve_path, reserve_port
from flexspec.runtime.server.serve import HttpServer
from repository import ROOT

ASK = {"model": "tiny/scripted", "prompt": "go", "stream": True, "max_tokens": 100}
WHOLE = "".join(f"{number} " for number in range(20))


def test_a_busy_port_is_refused() -> None:
    with reserve_port("127.0.0.1", 0) as first:
        port = first.port
        with pytest.raises(PortError, match=f"127.0.0.1:{port}.*FS602|FS602.*127.0.0.1:{port}") as busy:
            reserve_port("127.0.0.1", port)
        assert "--port" in busy.value.fix
    reserve_port("127.0.0.1", port).close()  # free again at once


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 70000, "0 to 65535"),
        ("x" * 64, 0, "--host"),
        ("", 0, "--host is empty"),
        ("192.0.2.1", 0, "address of this machine"),
    ],
)
def test_addresses_that_cannot_be_had(host: str, port: int, words: str) -> None:
    with pytest.raises(PortError, match=words):
        reserve_port(host, port)


def test_a_name_is_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(host: str, port: int, **_: Any) -> list[Any]:
        assert host == "two.example"
        missing = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", port))
        both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.1", "127.0.0.2")]
        return [missing, *both, both[0]]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with reserve_port("two.example", 0) as listener:
        assert [each.getsockname() for each in listener.sockets] == [
            ("127.0.0.1", listener.port),
            ("127.0.0.2", listener.port),
        ]
        assert listener.url == f"http://127.0.0.1:{listener.port}"
        with pytest.raises(PortError, match="ss -ltnp"):
            reserve_port("two.example", listener.port)


def test_ipv6_addresses_are_urls() -> None:
    try:
        listener = reserve_port("::1", 0)
    except PortError:
        pytest.skip("this machine has no ::1")
    with listener:
        assert listener.url == f"http://[::1]:{listener.port}"


def test_a_unix_socket(engine: ScriptedEngine, make_app: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "s"
    with reserve_path(path) as listener:
        assert listener.url == f"unix:{path}"
        with pytest.raises(PortError, match="--uds"):
            reserve_path(path)
        server = HttpServer(make_app(engine), grace_s=0.0)
        thread = threading.Thread(target=server.run_on, args=(listener,))
        thread.start()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=10) as client:
            assert client.get("http://x/v1/models").status_code == 200
        server.stop()
        thread.join(20)
        assert not thread.is_alive()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as dead:  # what a killed server leaves
        dead.bind(str(path))
    reserve_path(path).close()
    path.write_text("a file")
    with pytest.raises(PortError):
        reserve_path(path)
    assert path.read_text() == "a file"


def test_a_client_may_come_before_the_server_is_ready(engine: ScriptedEngine, start: Callable[..., Any]) -> None:
    with reserve_port("127.0.0.1", 0) as listener:
        address = listener.sockets[0].getsockname()
        with socket.create_connection(address, 5) as early:
            assert early.getpeername() == address


def open_stream(url: str, request: dict[str, Any]) -> Any:
    return httpx.stream("POST", url + "/v1/completions", json=request, timeout=15)


def read_some(parts: Iterator[bytes]) -> bytes:
    """Read until the first text has come."""
    got = b""
    while b'"text"' not in got:
        got += next(parts)
    return got


def test_stopping_lets_running_answers_finish(gated_engine: ScriptedEngine, start: Callable[..., Any]) -> None:
    gated_engine.script = Script([f"{number} " for number in range(20)])
    before = set(threading.enumerate())
    running = start(gated_engine, grace_s=30.0)
    with open_stream(running.url, ASK) as response:
        parts = response.iter_raw()
        gated_engine.allow(1)
        got = read_some(parts)
        running.server.stop()
        wait_refused(running.port)
        gated_engine.allow(30)
        events = events_of(got + b"".join(parts))
    assert running.join() == 0
    assert text_of(events) == WHOLE and finishes_of(events) == {0: "stop"} and events[-1] == "[DONE]"
    assert set(threading.enumerate()) <= before


@pytest.mark.slow(reason="servers in processes of their own")
@pytest.mark.parametrize("deaf", [False, True])
def test_answers_that_outlast_the_grace_period_are_cut(
    deaf: bool, gated_engine: ScriptedEngine, start: Callable[..., Any]
) -> None:
    gated_engine.script = Script(["a "] * 90)
    running = start(gated_engine, grace_s=0.0)
    with open_stream(running.url, {**ASK, "n": 2, "stream_options": {"include_usage": True}}) as response:
        parts = response.iter_raw()
        gated_engine.allow(3)
        got = read_some(parts)
        gated_engine.deaf = deaf  # a stuck engine must not hold the end of the stream back
        running.server.stop()
        events = events_of(got + b"".join(parts))
    assert running.join() == 0
    assert finishes_of(events) == {0: "cancelled", 1: "cancelled"}
    assert events[-1] == "[DONE]"
    said = sum(text_of(events, index).count("a") for index in (0, 1))
    assert events[-2]["usage"]["completion_tokens"] == said
    assert set(gated_engine.cancelled) == {1, 2}
    gated_engine.deaf = False


def test_half_an_answer_is_not_given_as_a_whole_one(gated_engine: ScriptedEngine, start: Callable[..., Any]) -> None:
    running = start(gated_engine, grace_s=0.0)
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(running.url + "/v1/completions", json={**ASK, "stream": False}))
    )
    asking.start()
    gated_engine.wait_until(lambda: len(gated_engine.submitted) == 1)
    assert running.stop() == 0
    asking.join(10)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"


def test_a_failed_engine_ends_the_server(gated_engine: ScriptedEngine, start: Callable[..., Any]) -> None:
    running = start(gated_engine, grace_s=60.0)
    with open_stream(running.url, ASK) as response:
        gated_engine.wait_until(lambda: len(gated_engine.submitted) == 1)
        gated_engine.failure = "rank 1 is gone"
        events = events_of(response.read())
    assert running.join() == 1
    assert finishes_of(events) == {0: "cancelled"} and events[-1] == "[DONE]"


def wait_refused(port: int) -> None:
    """Wait until nobody listens on the port any more."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            return
    raise AssertionError("the server still takes connections")


class Process:
    """tests/support/serve_scripted.py in a process of its own."""

    def __init__(self, grace_s: float) -> None:
        script = Path(__file__).parents[2] / "support" / "serve_scripted.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(grace_s)],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def allow(self, steps: int) -> None:
        assert self.process.stdin is not None
        print(steps, file=self.process.stdin, flush=True)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@pytest.fixture
def spawn() -> Iterator[Callable[[float], Process]]:
    spawned: list[Process] = []

    def spawn_server(grace_s: float) -> Process:
        spawned.append(Process(grace_s))
        return spawned[-1]

    yield spawn_server
    for one in spawned:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


@pytest.mark.slow(reason="servers in processes of their own")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_properly(number: signal.Signals, spawn: Callable[[float], Process]) -> None:
    server = spawn(30.0)
    with open_stream(server.url, {**ASK, "model": "m"}) as response:
        parts = response.iter_raw()
        server.allow(2)
        got = read_some(parts)
        server.process.send_signal(number)
        wait_refused(server.port)
        server.allow(30)
        events = events_of(got + b"".join(parts))
    assert text_of(events) == WHOLE and finishes_of(events) == {0: "stop"}
    code, out, err = server.end()
    assert (code, out.strip(), err) == (0, "closed MainThread", "")


@pytest.mark.slow(reason="servers in processes of their own")
def test_a_second_signal_ends_at_once(spawn: Callable[[float], Process]) -> None:
    server = spawn(60.0)
    with open_stream(server.url, {**ASK, "model": "m"}) as response:
        parts = response.iter_raw()
        server.allow(2)
        read_some(parts)
        server.process.send_signal(signal.SIGTERM)
        wait_refused(server.port)
        server.process.send_signal(signal.SIGTERM)
        code, out, _ = server.end()
        assert code == 128 + signal.SIGTERM and "closed" not in out
        with pytest.raises(httpx.RemoteProtocolError):
            b"".join(parts)


def test_the_server_needs_no_torch() -> None:
    code = (
        "import json, sys, flexspec.runtime.server.app, flexspec.runtime.server.serve;"
        "print(json.dumps(sorted({'torch', 'triton', 'transformers', 'onnx'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []

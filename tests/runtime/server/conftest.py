"""A server over a scripted engine: in this process without sockets, or on a loopback port in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from scripted_engine import ByteTokenizer, PlainChat, ScriptedEngine

from flexspec.runtime.server.app import create_app
from flexspec.runtime.server.listen import reserve_port
from flexspec.runtime.server.metrics import Metrics
from flexspec.runtime.server.requests import ServerLimits
from flexspec.runtime.server.serve import HttpServer

MODEL = "tiny/scripted"


@pytest.fixture
def limits() -> ServerLimits:
    return ServerLimits(context_tokens=2 * 10**6, max_choices=16, max_body_bytes=100_000)


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    yield engine
    engine.close()


@pytest.fixture
def gated_engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(gated=True)
    yield engine
    engine.close()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


@pytest.fixture
def make_app(metrics: Metrics, limits: ServerLimits) -> Callable[[ScriptedEngine], FastAPI]:
    return lambda engine: create_app(engine, ByteTokenizer(), PlainChat(), MODEL, metrics, limits)


class Running:
    """A server in a thread; ``stop`` waits for its end."""

    def __init__(self, app: FastAPI, grace_s: float) -> None:
        listener = reserve_port("127.0.0.1", 0)
        self.port = listener.port
        self.url = f"http://127.0.0.1:{self.port}"
        ready = threading.Event()
        self.server = HttpServer(app, grace_s=grace_s, on_ready=ready.set)
        self._thread = threading.Thread(target=self.server.run_on, args=(listener,))
        self._thread.start()
        assert ready.wait(10)

    def stop(self) -> int:
        self.server.stop()
        return self.join()

    def join(self) -> int:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.server.exit_code


@pytest.fixture
def start(make_app: Callable[[ScriptedEngine], FastAPI]) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start_server(engine: ScriptedEngine, grace_s: float = 0.0) -> Running:
        started.append(Running(make_app(engine), grace_s))
        return started[-1]

    yield start_server
    for running in started:
        running.stop()

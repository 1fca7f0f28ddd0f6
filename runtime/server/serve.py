"""Runs the application under uvicorn until a signal, and stops it without leaving a stream hanging.

First SIGTERM or SIGINT: no new connections or requests; running answers have ``grace_s`` to finish, then they are cut
with finish_reason "cancelled" (streams) or 503 (others). A second one exits at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from flexspec.runtime.engine.api import EngineClient
from flexspec.runtime.server.answer import CUT_WAIT_S
from flexspec.runtime.server.connection import Connection
from flexspec.runtime.server.drain import Drain
from flexspec.runtime.server.listen import BACKLOG, Listener

_FLUSH_S = 4.0  # after the cut, for clients that are still reading their last bytes
_TICKS_PER_CHECK = 5  # uvicorn ticks ten times a second


class HttpServer(uvicorn.Server):
    """A uvicorn server over a listening socket. ``run_on`` returns the exit code; ``stop`` works from any thread."""

    def __init__(
        self,
        app: FastAPI,
        *,
        grace_s: float = 10.0,
        on_ready: Callable[[], None] | None = None,
        exit_on_failure: bool = True,
    ) -> None:
        self._drain: Drain = app.state.drain
        self._engine: EngineClient = app.state.engine
        self._grace_s = grace_s
        self._on_ready = on_ready
        self._exit_on_failure = exit_on_failure
        self.exit_code = 0
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=Connection,
            ws="none",
            lifespan="off",
            backlog=BACKLOG,
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(grace_s + CUT_WAIT_S + _FLUSH_S) + 1,
        )
        super().__init__(config)

    def run_on(self, listener: Listener) -> int:
        """Serve until stopped; closes ``listener``. 0 after a signal or ``stop``, 1 after a failure of the engine."""
        self.run(sockets=list(listener.sockets))
        return self.exit_code

    def stop(self) -> None:
        """As the first signal."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)  # the second signal means now: no thread, no finally, no flush may delay it
        # Not recorded as uvicorn does: it would raise the signal again at the end, and the exit code would not be 0.
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        if self._exit_on_failure and counter % _TICKS_PER_CHECK == 0 and self._engine.load().failure is not None:
            self.exit_code = 1
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain.begin()
        grace_s = 0.0 if self.exit_code else self._grace_s  # a failed engine finishes nothing
        timer = asyncio.get_running_loop().call_later(grace_s, self._drain.expire)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def serve(
    app: FastAPI,
    listener: Listener,
    *,
    grace_s: float = 10.0,
    on_ready: Callable[[], None] | None = None,
    exit_on_failure: bool = True,
) -> int:
    """Serve on a socket from ``reserve_port`` until SIGTERM, SIGINT or a failure of the engine; returns the exit code.

    Call it from the main thread: signals are only handled there. ``on_ready`` is called once requests are accepted. The
    caller closes the engine afterwards.
    """
    server = HttpServer(app, grace_s=grace_s, on_ready=on_ready, exit_on_failure=exit_on_failure)
    return server.run_on(listener)

"""One HTTP connection: a client may end its side once it has asked, and malformed HTTP gets an answer in OpenAI's form.

The end of a client's input looks the same whether it waits for the answer (``nc -N``, relays, health checkers) or has
left. Only writing tells: a client that has left resets the connection. So the answer goes on, and until it does
something is written that every client skips: "100 Continue" before the head of an answer, a comment into a stream.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from flexspec.runtime.server.failures import malformed_http
from flexspec.runtime.server.openai import SSE_COMMENT

PROBE_S = 0.5  # between two writes to a client that has ended its side: the second finds it gone
_LINGER_S = 1.0  # input of a refused client is read this long: closing with unread input would take the answer back
EVENTS = "events"  # in the state of a request: its answer is a stream of events, and the last write was whole ones


class Connection(H11Protocol):
    """uvicorn's protocol with the two rules of this module."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ended = False  # the client has ended its side
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps the connection open for the answer."""
        if self._refused or not self._answering():
            return False
        if not self._ended:
            self._ended = True
            self._timer = self.loop.call_later(PROBE_S, self._probe)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._ended and not self._answering() and not self.transport.is_closing():
            self.timeout_keep_alive_handler()  # no further request can come

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, with a body as all our errors have."""
        if self._answering():  # garbage behind a request whose answer is not finished
            self.transport.close()
            return
        answer = malformed_http(msg, self.client[0] if self.client else "")
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(answer.body)).encode()))
        for event in (
            h11.Response(status_code=answer.status_code, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _answering(self) -> bool:
        """Whether a whole request waits for the rest of its answer."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _probe(self) -> None:
        if self.transport.is_closing() or not self._answering():
            return
        if not self.cycle.response_started:
            if self.scope["http_version"] == "1.1":  # 1.0 knows no interim answers
                interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                self.transport.write(self.conn.send(interim) or b"")
        elif self.scope["state"].get(EVENTS) and not self.flow.write_paused:
            self.transport.write(self.conn.send(h11.Data(data=SSE_COMMENT)) or b"")
        self._timer = self.loop.call_later(PROBE_S, self._probe)

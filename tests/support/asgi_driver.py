"""Drives an ASGI application by hand: the test decides when the client leaves and when a write goes through."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]


class Client:
    """One HTTP request. ``writable`` cleared holds the server's writes back; ``leave`` disconnects."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self._app = app
        self._path = path
        self._inbox: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._gone = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self.status = 0
        self.chunks: list[bytes] = []
        self._written = asyncio.Condition()

    async def run(self) -> None:
        path = self._path.encode()
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": "POST", "scheme": "http", "path": self._path, "raw_path": path, "query_string": b"",
            "root_path": "", "headers": [], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }  # fmt: skip
        await self._app(scope, self._receive, self._send)

    def leave(self) -> None:
        self._gone.set()

    async def written(self, holds: Callable[[bytes], bool]) -> None:
        """Wait until the body written so far satisfies ``holds``."""
        async with self._written:
            await asyncio.wait_for(self._written.wait_for(lambda: holds(b"".join(self.chunks))), 10)

    @property
    def events(self) -> list[Any]:
        """The parsed events of a stream, "[DONE]" as it is."""
        return events_of(b"".join(self.chunks))

    async def _receive(self) -> Message:
        if self._inbox:
            return self._inbox.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.writable.wait()
        async with self._written:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            elif message.get("body"):
                self.chunks.append(message["body"])
            self._written.notify_all()


def events_of(stream: bytes) -> list[Any]:
    """Events of an SSE body; each must be one data line and a blank line."""
    *blocks, rest = stream.split(b"\n\n")
    assert rest == b""
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks)
    data = [block[6:].decode("utf-8") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def text_of(events: list[Any], index: int = 0) -> str:
    """The text that a stream gave for one choice."""
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", ())]
    pieces = [choice.get("text", "") or choice.get("delta", {}).get("content", "") for choice in choices
              if choice["index"] == index]  # fmt: skip
    return "".join(pieces)


def finishes_of(events: list[Any]) -> dict[int, str]:
    """The finish_reason of each choice of a stream."""
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", ())]
    return {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}

"""What every request passes before the application: its id, the log, origins, the key, HEAD and inflated bodies.

A page in a browser must not drive a server that only listens locally, so requests with an Origin are refused unless
the origin is one of ``DoorOptions.origins``. Clients that are no browsers send none.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flexspec.runtime.server.bodies.inflate import inflating
from flexspec.runtime.server.failures import Failure, log_failure
from flexspec.runtime.server.metrics import Metrics
from flexspec.runtime.server.openai import Json

OPEN_PATHS = ("/health",)  # need no key and may be asked from anywhere: probes know neither
_METHODS = "GET, HEAD, POST, OPTIONS"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")
_BROWSER_SITES = ("cross-site", "same-site", "same-origin")  # of Sec-Fetch-Site


@dataclass(frozen=True, slots=True)
class DoorOptions:
    """Who may come in, and what is written down of it."""

    origins: tuple[str, ...] = ()  # of pages in browsers; "*" lets all in
    key_digests: tuple[bytes, ...] = ()  # of the API keys; empty: no key is asked for
    root_path: str = ""  # in front of every path, where a proxy does not take it off
    access_log: Callable[[Json], None] | None = None
    max_body_bytes: int = 8 << 20  # of an inflated body


def key_digest(key: str) -> bytes:
    """What is kept of a key, of one length, so that comparing tells nothing."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Door:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, options: DoorOptions, metrics: Metrics) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        visit = _Visit(scope, headers, send, self._allowed_origin(headers))
        path: str = scope["path"]
        root = self._options.root_path
        if root and path.startswith(root + "/"):
            path = path[len(root) :]
        inner = {**scope, "path": path, "raw_path": path.encode(), "state": visit.state}
        if scope["method"] == "HEAD":
            inner["method"] = "GET"
        try:
            refused = self._refused(inner, headers, visit.origin)
            if refused is not None:
                await self._answer(refused, inner, receive, visit.send)
            else:
                bodies = inflating(receive, headers.get("content-encoding"), self._options.max_body_bytes)
                await self._app(inner, bodies, visit.send)
        finally:
            if self._options.access_log is not None:
                self._options.access_log(visit.entry())

    def _allowed_origin(self, headers: Headers) -> str | None:
        origin = headers.get("origin")
        allowed = self._options.origins
        return origin if origin is not None and (origin in allowed or "*" in allowed) else None

    def _refused(self, scope: Scope, headers: Headers, origin: str | None) -> Failure | None:
        """Why the request may not come in, or the answer to a preflight; None if it may."""
        path, method = scope["path"], scope["method"]
        browser = "origin" in headers or headers.get("sec-fetch-site") in _BROWSER_SITES
        if browser and origin is None and path not in OPEN_PATHS and (method != "GET" or "origin" in headers):
            found = headers.get("origin", "none")[:200]
            message = f"Pages of origin {found!r} may not use this server. Fix: serve with --cors-origin {found}"
            return Failure(403, message, code="origin_not_allowed")
        if method == "OPTIONS":
            return Failure(204, "", code="preflight", headers=_preflight(headers) if origin else {"Allow": _METHODS})
        if browser and method == "POST" and headers.get("content-type", "").split(";")[0].strip() != "application/json":
            message = "A browser's request must have the content type application/json"
            return Failure(415, message, code="unsupported_media_type")
        if self._options.key_digests and path not in OPEN_PATHS and not self._has_key(headers):
            message = "Incorrect or missing API key. Fix: send it as Authorization: Bearer KEY"
            return Failure(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        sent = hashlib.sha256(key.encode("latin-1")).digest()  # the bytes of the header, whatever characters they spell
        return any([hmac.compare_digest(sent, digest) for digest in self._options.key_digests])

    async def _answer(self, failure: Failure, scope: Scope, receive: Receive, send: Send) -> None:
        if failure.status == 204:
            headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in failure.headers.items()]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        self._metrics.record_refused(failure.status, failure.code)
        log_failure(failure, scope["method"], scope["path"])
        await failure.response()(scope, receive, send)


class _Visit:
    """One request: its id, and what is sent back."""

    def __init__(self, scope: Scope, headers: Headers, send: Send, origin: str | None) -> None:
        asked = headers.get("x-request-id", "")
        self.request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        self.origin = origin
        self.state = scope.setdefault("state", {})
        self.state["request_id"] = self.request_id
        self._scope = scope
        self._send = send
        self._started = time.monotonic()
        self._status = 0
        self._sent_bytes = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            if self.origin is not None:
                headers["access-control-allow-origin"] = self.origin
                headers["access-control-expose-headers"] = "x-request-id"
                headers.add_vary_header("Origin")
        elif message["type"] == "http.response.body":
            if self._scope["method"] == "HEAD":
                message = {**message, "body": b""}
            self._sent_bytes += len(message.get("body", b""))
        await self._send(message)

    def entry(self) -> Json:
        """The line of the access log; status 0 is a client that left before an answer began."""
        client = self._scope.get("client")
        return {
            "time": round(time.time(), 3),
            "request_id": self.request_id,
            "client": client[0] if client else None,
            "method": self._scope["method"],
            "path": self._scope["path"],
            "status": self._status,
            "duration_ms": round(1000 * (time.monotonic() - self._started), 3),
            "sent_bytes": self._sent_bytes,
        }


def _preflight(headers: Headers) -> dict[str, str]:
    allowed = {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "*"),
        "Access-Control-Max-Age": "600",
    }
    if headers.get("access-control-request-private-network") == "true":
        allowed["Access-Control-Allow-Private-Network"] = "true"
    return allowed

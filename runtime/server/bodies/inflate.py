"""Bodies that clients send compressed, inflated as they come and bounded by their inflated size."""

from __future__ import annotations

import zlib

from starlette.types import Message, Receive

from flexspec.runtime.server.failures import Failure, HttpError, body_too_large

_PIECE = 1 << 16
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's codes


def inflating(receive: Receive, encoding: str | None, max_bytes: int) -> Receive:
    """``receive`` with the body inflated. What it returns raises HttpError for what cannot be, or is too large."""
    name = (encoding or "identity").strip().lower()
    if name == "identity":
        return receive
    inflater = zlib.decompressobj(_WINDOWS.get(name, 31))
    total = 0
    pending = b""
    more = True

    async def inflated() -> Message:
        nonlocal total, pending, more
        if name not in _WINDOWS:
            found = f"content-encoding {name[:80]!r} is not offered; send gzip, deflate or none"
            raise HttpError(Failure(415, found, code="unsupported_media_type"))
        if not pending and more:
            message = await receive()
            if message["type"] != "http.request":
                return message
            pending, more = message.get("body", b""), message.get("more_body", False)
        elif not pending:
            return await receive()  # the disconnect
        try:
            data = inflater.decompress(pending, _PIECE)
        except zlib.error as error:
            raise HttpError(Failure(400, f"a body that is not {name} ({error})", code="invalid_value")) from None
        pending = b"" if inflater.eof else inflater.unconsumed_tail
        if not pending and not more and not inflater.eof:
            raise HttpError(Failure(400, f"a body of {name} that ends too early", code="invalid_value"))
        total += len(data)
        if total > max_bytes:
            raise body_too_large(max_bytes)
        return {"type": "http.request", "body": data, "more_body": bool(pending) or more}

    return inflated

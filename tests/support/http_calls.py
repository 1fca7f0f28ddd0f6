"""Requests to an application in this process, without sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"model": "tiny/scripted", "prompt": "go"}


def call(app: FastAPI, method: str, path: str, **more: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **more)

    return asyncio.run(main())


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)

"""The HTTP application: routes, and every error in OpenAI's format. Owns no state.

Imports no torch: the CPU path serves without it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from flexspec import __version__
from flexspec.errors import FlexspecError, RequestError
from flexspec.runtime.engine.api import EngineClient
from flexspec.runtime.server.answer import Answer
from flexspec.runtime.server.drain import Drain
from flexspec.runtime.server.failures import Failure, HttpError, failure_of, log_failure, shutting_down, wrong_model
from flexspec.runtime.server.metrics import Metrics
from flexspec.runtime.server.openai import Json, model_card
from flexspec.runtime.server.prompt_bounds import BoundedChat, BoundedTokenizer
from flexspec.runtime.server.refusals import cut
from flexspec.runtime.server.requests import (
    ChatBody,
    ChatRenderer,
    CompletionBody,
    GenerationRequest,
    ServerLimits,
    Tokenizer,
    read_chat,
    read_completion,
)

Reader = Callable[[Json], GenerationRequest]
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    chat: ChatRenderer | None,
    model_name: str,
    metrics: Metrics,
    limits: ServerLimits,
) -> FastAPI:
    """The application over an engine; ``chat`` None for a model without a chat template.

    ``app.state.drain`` and ``app.state.engine`` are for ``serve``.
    """
    app = FastAPI(title="flexspec", version=__version__, docs_url=None, redoc_url=None)
    app.state.drain, app.state.engine = Drain(), engine
    handler = _RequestHandler(engine, model_name, limits, app.state.drain)
    bounded = BoundedTokenizer(tokenizer, limits.context_tokens)
    bounded_chat = None if chat is None else BoundedChat(chat, bounded)

    def as_chat(body: Json) -> GenerationRequest:
        bounded.check_count(body.get("messages"))
        return read_chat(body, bounded, bounded_chat, limits)

    as_text: Reader = partial(read_completion, tokenizer=bounded, limits=limits)
    parts: Json = {}
    _add_generating(app, handler, CHAT_PATH, ChatBody, as_chat, parts)
    _add_generating(app, handler, TEXT_PATH, CompletionBody, as_text, parts)
    _add_models(app, model_name)
    _add_monitoring(app, engine, metrics, limits)
    _add_error_handlers(app, metrics)
    app.openapi().setdefault("components", {}).setdefault("schemas", {}).update(parts)
    return app


class _RequestHandler:
    """Reads a request (body, model name, parameters) and returns the answer that will run it."""

    def __init__(self, engine: EngineClient, model_name: str, limits: ServerLimits, drain: Drain) -> None:
        self._engine = engine
        self._model_name = model_name
        self._limits = limits
        self._drain = drain

    async def answer(self, request: Request, read: Reader) -> Response:
        body = await self._body(request)
        model = body.get("model")
        if isinstance(model, str) and model != self._model_name:
            raise wrong_model(model, self._model_name)
        # In a thread: tokenizing a long prompt takes many milliseconds, and all streams share this loop.
        parsed = await asyncio.to_thread(read, body)
        if self._drain.started:
            raise shutting_down()
        return Answer(self._engine, parsed, self._drain)

    async def _body(self, request: Request) -> Json:
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self._limits.max_body_bytes:
                most = f"The body is larger than {self._limits.max_body_bytes} bytes"
                raise HttpError(Failure(413, most, code="body_too_large", headers={"Connection": "close"}))
        try:
            body = json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"a body that is not JSON ({error})", "a JSON object", "send valid JSON") from None
        if not isinstance(body, dict):
            raise RequestError(f"a JSON {type(body).__name__}", "a JSON object", "send the parameters as an object")
        return body


def _add_generating(
    app: FastAPI, handler: _RequestHandler, path: str, shape: type[BaseModel], read: Reader, parts: Json
) -> None:
    # The body is read by hand (size limit, OpenAI's errors), so the schema in /openapi.json is added by hand too.
    schema = shape.model_json_schema(ref_template="#/components/schemas/{model}")
    parts.update(schema.pop("$defs", {}))
    content = {"application/json": {"schema": schema}}
    extra = {"requestBody": {"content": content, "required": True}}

    async def generate(request: Request) -> Response:
        return await handler.answer(request, read)

    app.add_api_route(path, generate, methods=["POST"], response_class=Response, openapi_extra=extra)


def _add_models(app: FastAPI, model_name: str) -> None:
    card = model_card(model_name, int(time.time()))

    async def models() -> Json:
        return {"object": "list", "data": [card]}

    async def model(name: str) -> Json:
        if name != model_name:
            raise wrong_model(name, model_name)
        return card

    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"])


def _add_monitoring(app: FastAPI, engine: EngineClient, metrics: Metrics, limits: ServerLimits) -> None:
    async def health() -> Response:
        load, age_s = engine.load(), engine.last_step_age_s()
        stalled = load.running + load.queued > 0 and age_s > limits.stall_s
        status = "failed" if load.failure else "stalled" if stalled else "ok"
        if status == "ok" and app.state.drain.started:
            status = "stopping"
        body: dict[str, Any] = {
            "status": status,
            "last_step_age_s": round(age_s, 3),
            "running": load.running,
            "queued": load.queued,
        }
        if load.failure:
            body["failure"] = load.failure
        return JSONResponse(body, 200 if status == "ok" else 503)

    async def scrape() -> Response:
        load = engine.load()
        metrics.set_load(load.running, load.queued)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app.add_api_route("/health", health, methods=["GET"], response_class=JSONResponse)
    app.add_api_route("/metrics", scrape, methods=["GET"], response_class=Response)


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    def answer(request: Request, failure: Failure) -> Response:
        metrics.record_refused(failure.status, failure.code, failure.counted)
        log_failure(failure, request.method, request.url.path)
        return failure.response()

    @app.exception_handler(FlexspecError)
    async def typed(request: Request, error: FlexspecError) -> Response:
        return answer(request, failure_of(error, "messages" if request.url.path == CHAT_PATH else "prompt"))

    @app.exception_handler(HttpError)
    async def http(request: Request, error: HttpError) -> Response:
        return answer(request, error.failure)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {cut(request.method)} {cut(request.url.path, 200)}"
        return answer(
            request, Failure(error.status_code, message, code="unknown_url", headers=dict(error.headers or {}))
        )

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return answer(request, Failure(400, str(error), code="invalid_value"))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nginx's number for a client that disconnected; nobody reads it

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return answer(
            request, Failure(500, f"internal error: {type(error).__name__}", "server_error", code="internal_error")
        )

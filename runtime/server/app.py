"""The HTTP application: routes, and every error in OpenAI's format. Owns no state.

Imports no torch: the CPU path serves without it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from flexspec import __version__
from flexspec.errors import FlexspecError, RequestError
from flexspec.runtime.engine.api import EngineClient
from flexspec.runtime.server.answer import Answer
from flexspec.runtime.server.bodies.refusals import cut
from flexspec.runtime.server.bodies.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from flexspec.runtime.server.door import Door, DoorOptions
from flexspec.runtime.server.drain import Drain
from flexspec.runtime.server.failures import (
    Failure,
    HttpError,
    body_too_large,
    failure_of,
    log_failure,
    shutting_down,
    wrong_model,
)
from flexspec.runtime.server.metrics import Metrics
from flexspec.runtime.server.openai import Json, model_card, to_json
from flexspec.runtime.server.prompt_bounds import BoundedChat, BoundedTokenizer
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
from flexspec.runtime.server.responses import ResponsesAnswer, ResponsesBody, read_responses

Reader = Callable[[Json], GenerationRequest]
Read = TypeVar("Read")
_DISCARDED = 8  # times the limit: bodies up to this are read to their end, so that their client sees the refusal
CHAT_PATH, TEXT_PATH, RESPONSES_PATH = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_PROMPTS = {CHAT_PATH: "messages", RESPONSES_PATH: "input"}  # the parameter that holds the prompt, if not "prompt"


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    chat: ChatRenderer | None,
    model_name: str,
    metrics: Metrics,
    limits: ServerLimits,
    door: DoorOptions | None = None,
) -> FastAPI:
    """The application over an engine; ``chat`` None for a model without a chat template.

    ``app.state.drain`` and ``app.state.engine`` are for ``serve``.
    """
    app = _Application(door or DoorOptions(), metrics)
    app.state.drain, app.state.engine = Drain(), engine
    handler = _RequestHandler(engine, model_name, limits, app.state.drain)
    bounded = BoundedTokenizer(tokenizer, limits.context_tokens)
    bounded_chat = None if chat is None else BoundedChat(chat, bounded)

    def as_chat(body: Json) -> GenerationRequest:
        bounded.check_count(body.get("messages"))
        return read_chat(body, bounded, bounded_chat, limits)

    def as_response(body: Json) -> GenerationRequest:
        bounded.check_count(body.get("input"))
        return read_responses(body, bounded, bounded_chat, limits)

    def as_tokens(body: Json) -> Json:
        bounded.check_count(body.get("messages"))
        return tokenize(body, bounded, bounded_chat, limits)

    as_text: Reader = partial(read_completion, tokenizer=bounded, limits=limits)
    parts: Json = {}
    _add_generating(app, handler, CHAT_PATH, ChatBody, as_chat, Answer, parts)
    _add_generating(app, handler, TEXT_PATH, CompletionBody, as_text, Answer, parts)
    _add_generating(app, handler, RESPONSES_PATH, ResponsesBody, as_response, ResponsesAnswer, parts)
    _add_reading(app, handler, "/tokenize", TokenizeBody, as_tokens, parts)
    _add_reading(app, handler, "/detokenize", DetokenizeBody, partial(detokenize, tokenizer=bounded), parts)
    _add_models(app, model_name)
    _add_monitoring(app, engine, metrics, limits)
    _add_error_handlers(app, metrics)
    app.openapi().setdefault("components", {}).setdefault("schemas", {}).update(parts)
    return app


class _Application(FastAPI):
    """FastAPI behind a door, which sees what its own handlers of errors answer too."""

    def __init__(self, door: DoorOptions, metrics: Metrics) -> None:
        servers = [{"url": door.root_path}] if door.root_path else None
        super().__init__(title="flexspec", version=__version__, docs_url=None, redoc_url=None, servers=servers)
        self._door, self._metrics = door, metrics

    def build_middleware_stack(self) -> ASGIApp:
        return Door(super().build_middleware_stack(), self._door, self._metrics)


class _RequestHandler:
    """Reads a request (body, model name, parameters) and returns the answer that will run it."""

    def __init__(self, engine: EngineClient, model_name: str, limits: ServerLimits, drain: Drain) -> None:
        self._engine = engine
        self._model_name = model_name
        self._limits = limits
        self._drain = drain

    async def answer(self, request: Request, read: Reader, form: type[Answer]) -> Response:
        parsed = await self.read(request, read)
        if self._drain.started:
            raise shutting_down()
        return form(self._engine, parsed, self._drain)

    async def read(self, request: Request, read: Callable[[Json], Read]) -> Read:
        """What ``read`` makes of the body."""
        body = await self._body(request)
        model = body.get("model")
        if isinstance(model, str) and model != self._model_name:
            raise wrong_model(model, self._model_name)
        # In a thread: tokenizing a long prompt takes many milliseconds, and all streams share this loop.
        return await asyncio.to_thread(read, body)

    async def _body(self, request: Request) -> Json:
        most = self._limits.max_body_bytes
        announced = request.headers.get("content-length", "")
        if "expect" in request.headers and announced.isdecimal() and int(announced) > most:
            raise body_too_large(most)  # before the client sends it
        data, total = bytearray(), 0
        async for part in request.stream():
            total += len(part)
            if total <= most:
                data += part
            elif total > _DISCARDED * most:
                break
        if total > most:  # only now: an answer is lost when the connection closes on a client that is still sending
            raise body_too_large(most)
        try:
            body = json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"a body that is not JSON ({error})", "a JSON object", "send valid JSON") from None
        if not isinstance(body, dict):
            raise RequestError(f"a JSON {type(body).__name__}", "a JSON object", "send the parameters as an object")
        return body


def _add_generating(
    app: FastAPI,
    handler: _RequestHandler,
    path: str,
    shape: type[BaseModel],
    read: Reader,
    form: type[Answer],
    parts: Json,
) -> None:
    async def generate(request: Request) -> Response:
        return await handler.answer(request, read, form)

    _add_post(app, path, shape, generate, parts)


def _add_reading(
    app: FastAPI, handler: _RequestHandler, path: str, shape: type[BaseModel], read: Callable[[Json], Json], parts: Json
) -> None:
    async def answer(request: Request) -> Response:
        return Response(to_json(await handler.read(request, read)), media_type="application/json")

    _add_post(app, path, shape, answer, parts)


def _add_post(
    app: FastAPI, path: str, shape: type[BaseModel], endpoint: Callable[[Request], Awaitable[Response]], parts: Json
) -> None:
    # The body is read by hand (size limit, OpenAI's errors), so the schema in /openapi.json is added by hand too.
    schema = shape.model_json_schema(ref_template="#/components/schemas/{model}")
    parts.update(schema.pop("$defs", {}))
    content = {"application/json": {"schema": schema}}
    extra = {"requestBody": {"content": content, "required": True}}

    app.add_api_route(path, endpoint, methods=["POST"], response_class=Response, openapi_extra=extra)


def _add_models(app: FastAPI, model_name: str) -> None:
    card = model_card(model_name, int(time.time()))

    async def models() -> Json:
        return {"object": "list", "data": [card]}

    async def model(name: str) -> Json:
        if name != model_name:
            raise wrong_model(name, model_name)
        return card

    async def version() -> Json:
        return {"version": __version__}

    app.add_api_route("/version", version, methods=["GET"])
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
        return answer(request, failure_of(error, _PROMPTS.get(request.url.path, "prompt")))

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

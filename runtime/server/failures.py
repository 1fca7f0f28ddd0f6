"""Errors as HTTP answers in OpenAI's format. Owns the status, type and code of each error, and its line in the log."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field

from starlette.responses import Response

from flexspec.errors import CapacityError, EngineError, FlexspecError, QueueFullError, RequestError
from flexspec.runtime.server.bodies.refusals import UnsupportedError, cut, shown
from flexspec.runtime.server.openai import error_body, to_json

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_MOST_TEXT = 2000  # characters of a message, however much of a request an error quotes
_LOG = logging.getLogger("flexspec.server")
NO_REASON = "the engine gave no reason"


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as the client sees it."""

    status: int
    message: str
    kind: str = _INVALID
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    counted: tuple[str, ...] = ()  # the parameters at fault, as metrics name them

    def response(self) -> Response:
        param = None if self.param is None else cut(self.param, 200)
        body = to_json(error_body(cut(self.message, _MOST_TEXT), self.kind, param, self.code))
        return Response(body, self.status, dict(self.headers), "application/json")


def log_failure(failure: Failure, method: str, path: str) -> None:
    """One line for a request that was refused or failed, with all parameters at fault."""
    at_fault = f" ({', '.join(failure.counted)})" if failure.counted else ""
    _LOG.warning("flexspec: %s %s: %d %s%s", cut(method), shown(path), failure.status, failure.code, at_fault)


class HttpError(Exception):
    """An error that exists only in HTTP: wrong path, wrong model name, body too large, shutting down."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


def failure_of(error: FlexspecError, prompt_param: str = "prompt") -> Failure:
    """The answer to a typed error; ``prompt_param`` is the parameter that holds the prompt on this endpoint."""
    message = str(error)
    match error:
        case UnsupportedError():
            return Failure(400, message, param=error.param, code="unsupported_parameter", counted=error.counted)
        case RequestError():
            param = prompt_param if error.param == "prompt" else error.param  # the engine has no notion of chats
            counted = () if param is None else (re.sub(r"\[\d+\]", "", param),)
            return Failure(400, message, param=param, code="invalid_value", counted=counted)
        case QueueFullError():
            wait = {"Retry-After": str(error.retry_after_s)}
            return Failure(503, message, _SERVER, code="queue_full", headers=wait)
        case CapacityError():
            return Failure(400, message, param=prompt_param, code="context_length_exceeded")
        case EngineError():
            return Failure(503, message, _SERVER, code="engine_failed")
        case _:
            return Failure(500, message, _SERVER, code=error.code)


def malformed_http(problem: str, client: str) -> Response:
    """400 for what is no HTTP; there is no request yet that handlers could answer."""
    failure = Failure(400, problem, code="malformed_http")
    log_failure(failure, "malformed HTTP from", client)
    return failure.response()


def body_too_large(most: int) -> HttpError:
    """413: the body, inflated, has more bytes than the server reads."""
    headers = {"Connection": "close"}
    return HttpError(Failure(413, f"The body is larger than {most} bytes", code="body_too_large", headers=headers))


def wrong_model(asked: str, served: str) -> HttpError:
    """404: the request names a model that is not served."""
    message = f"The model {cut(asked)!r} is not served here. Fix: send model={served!r} (GET /v1/models lists it)"
    return HttpError(Failure(404, message, param="model", code="model_not_found"))


def shutting_down() -> HttpError:
    """503: the server has been told to stop."""
    wait = {"Retry-After": "5", "Connection": "close"}
    return HttpError(Failure(503, "The server is shutting down", _SERVER, code="shutting_down", headers=wait))


def engine_error(message: str | None) -> HttpError:
    """500: the engine ended a request with an error before anything was sent."""
    return HttpError(Failure(500, message or NO_REASON, _SERVER, code="engine_error"))

"""POST /v1/responses, OpenAI's newer interface: text in and out, streamed as typed events, and nothing is stored.

A body becomes a chat: ``instructions`` its system message, the items of ``input`` its turns.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from flexspec.errors import RequestError
from flexspec.runtime.server.answer import Answer, Chunk, Generation
from flexspec.runtime.server.bodies.messages import Message, parse_messages, refused_message_keys
from flexspec.runtime.server.bodies.neutral import RESPONSES_NEUTRAL
from flexspec.runtime.server.bodies.refusals import Refused, UnsupportedError, shown
from flexspec.runtime.server.failures import NO_REASON
from flexspec.runtime.server.openai import Json, event, usage
from flexspec.runtime.server.requests import (
    ChatRenderer,
    GenerateBody,
    GenerationRequest,
    ServerLimits,
    Tokenizer,
    build_request,
    render_prompt,
    validate,
)

_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesBody(GenerateBody):
    """POST /v1/responses."""

    input: Any = Field(json_schema_extra={"description": "a string, or items: messages, function_call and its output"})
    instructions: str | None = None
    max_output_tokens: int | None = None


def read_responses(
    body: Mapping[str, object], tokenizer: Tokenizer, chat: ChatRenderer | None, limits: ServerLimits
) -> GenerationRequest:
    """Check a body and tokenize it. Raises RequestError with the parameter's name."""
    items = _items(body.get("input"))
    refused = [_renamed(item) for item in refused_message_keys(items)]
    parsed = validate(ResponsesBody, body, RESPONSES_NEUTRAL, refused)
    if parsed.n != 1:
        raise UnsupportedError(f"n={parsed.n}", "one answer", "leave n out", param="n", counted=("n",))
    try:
        messages = parse_messages(items)
        if parsed.instructions is not None:
            messages = [*parse_messages([{"role": "system", "content": parsed.instructions}]), *messages]
        prompt = render_prompt(messages, tokenizer, chat)
    except RequestError as error:
        error.param = (error.param or "").replace("messages", "input") or None
        raise
    extra = {key: body.get(key) for key in ("instructions", "metadata", "user")}
    return build_request("response", parsed, [prompt], limits.default_max_tokens, limits, extra=extra)


def _renamed(item: Refused) -> Refused:
    return Refused(*(text.replace("messages", "input") for text in (item.param, item.counted, item.found)))


def _items(items: object) -> list[Message]:
    """The turns of ``input`` as chat messages, which are checked as those are."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise RequestError(f"input={shown(items)}", "a string or a list of items", "send the text", param="input")
    return [_message(item, f"input[{place}]") for place, item in enumerate(items)]


def _message(item: Message, where: str) -> Message:
    match item.get("type", "message"):
        case "message":
            content = item.get("content")
            if isinstance(content, list):
                content = [_part(part) for part in content]
            others = {key: value for key, value in item.items() if key not in ("type", "status", "phase")}
            return {**others, "content": content}
        case "function_call":
            function = {key: item.get(key) for key in ("name", "arguments")}
            return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
        case "function_call_output":
            output = item.get("output")
            output = [_part(part) for part in output] if isinstance(output, list) else output
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        case other:
            raise UnsupportedError(
                f"{where}.type={shown(other)}", "message, function_call or function_call_output", "send text only",
                param=f"{where}.type", counted=("input.type",),
            )  # fmt: skip


def _part(part: object) -> object:
    return {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else part


class ResponsesAnswer(Answer):
    """The answer as one ``response`` object, or as the events of its making."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._response_id = f"resp_{uuid.uuid4().hex}"
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._events_sent = 0
        self._text: list[str] = []

    def _begin(self) -> list[bytes]:
        state = self._response("in_progress", [], None)
        item = {**self._item("in_progress"), "content": []}
        return [
            self._event("response.created", response=state),
            self._event("response.in_progress", response=state),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place(), part=_text_part("")),
        ]

    def _events(self, chunk: Chunk, opened: set[int], generation: Generation) -> list[bytes]:
        events = []
        if chunk.text:
            self._text.append(chunk.text)
            events.append(self._event("response.output_text.delta", **self._place(), delta=chunk.text, logprobs=[]))
        if chunk.finish_reason == "error":
            failed = self._response("failed", [], generation)
            failed["error"] = {"code": "server_error", "message": chunk.error or NO_REASON}
            events.append(self._event("response.failed", response=failed))
        return events

    def _end(self, generation: Generation, failed: bool) -> list[bytes]:
        if failed:
            return []
        text = "".join(self._text)
        final = self._final(text, generation)
        (item,) = final["output"]
        return [
            self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=_text_part(text)),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{final['status']}", response=final),
        ]

    def _whole(self, texts: list[str], generation: Generation) -> Json:
        return self._final(texts[0], generation)

    def _final(self, text: str, generation: Generation) -> Json:
        reason = generation.choices[0].finish_reason
        status = "completed" if reason == "stop" else "incomplete"
        item = {**self._item(status), "content": [_text_part(text)]}
        response = self._response(status, [item], generation)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens" if reason == "length" else reason}
        return response

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._events_sent += 1
        return event(kind, {"type": kind, "sequence_number": self._events_sent - 1, **fields})

    def _place(self) -> Json:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str) -> Json:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant"}

    def _response(self, status: str, output: list[Json], generation: Generation | None) -> Json:
        request = self._request
        params = request.samples[0].params
        return {
            "id": self._response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.extra.get("instructions"),
            "max_output_tokens": params.max_tokens,
            "metadata": request.extra.get("metadata") or {},
            "model": request.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if generation is None else self._counts(generation),
            "user": request.extra.get("user"),
        }

    def _counts(self, generation: Generation) -> Json:
        counted = usage(self._request.prompt_tokens, [choice.stats for choice in generation.choices])
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
            "flexspec": counted["flexspec"],
        }


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

"""The shapes of OpenAI's answers: whole objects, stream chunks, usage, errors. Data only; nothing here waits.

One addition: ``usage.flexspec`` has the counts of speculation for this answer.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flexspec.runtime.engine.api import RequestStats

Json = dict[str, Any]

# A JSON string may hold these as they are, but line readers that split like str.splitlines would cut an event in two.
_LINE_BREAKS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


def to_json(value: Json) -> bytes:
    """UTF-8 JSON in one line, without characters that some readers take for a line break."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character, escape in _LINE_BREAKS:
        text = text.replace(character, escape)
    # A lone surrogate has no UTF-8; backslashreplace writes it as the JSON escape of itself.
    return text.encode("utf-8", "backslashreplace")


def sse(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def event(kind: str, value: Json) -> bytes:
    """One server-sent event with a name."""
    return b"event: " + kind.encode() + b"\ndata: " + to_json(value) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
SSE_COMMENT = b":\n\n"  # readers skip it


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Answers of /v1/chat/completions."""

    model: str
    answer_id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk(self, choices: list[Json]) -> Json:
        return _envelope(self, "chat.completion.chunk", choices)

    def complete(self, choices: list[Json]) -> Json:
        return _envelope(self, "chat.completion", choices)

    def opening(self, index: int) -> Json | None:
        """The first chunk of a choice names the role."""
        return _choice(index, "delta", {"role": "assistant", "content": ""}, None)

    def content(self, index: int, text: str) -> Json:
        return _choice(index, "delta", {"content": text}, None)

    def closing(self, index: int, reason: str) -> Json:
        return _choice(index, "delta", {}, reason)

    def choice(self, index: int, text: str, reason: str) -> Json:
        return _choice(index, "message", {"role": "assistant", "content": text, "refusal": None}, reason)


@dataclass(frozen=True, slots=True)
class TextFormat:
    """Answers of /v1/completions."""

    model: str
    answer_id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk(self, choices: list[Json]) -> Json:
        return _envelope(self, "text_completion", choices)

    def complete(self, choices: list[Json]) -> Json:
        return _envelope(self, "text_completion", choices)

    def opening(self, index: int) -> Json | None:
        return None

    def content(self, index: int, text: str) -> Json:
        return _choice(index, "text", text, None)

    def closing(self, index: int, reason: str) -> Json:
        return _choice(index, "text", "", reason)

    def choice(self, index: int, text: str, reason: str) -> Json:
        return _choice(index, "text", text, reason)


Format = ChatFormat | TextFormat


def usage(prompt_tokens: int, stats: Sequence[RequestStats]) -> Json:
    """Token counts of an answer and what speculation did: sums over its choices, and their ratio.

    ``tokens_per_round`` leaves out the first token of each choice, which comes from the prefill; null without a round.
    """
    completion = sum(item.completion_tokens for item in stats)
    rounds = sum(item.rounds for item in stats)
    from_rounds = sum(max(0, item.completion_tokens - 1) for item in stats)
    return {
        **counts(prompt_tokens, completion),
        "flexspec": {
            "rounds": rounds,
            "drafted": sum(item.drafted for item in stats),
            "accepted": sum(item.accepted for item in stats),
            "tokens_per_round": round(from_rounds / rounds, 4) if rounds else None,
        },
    }


def counts(prompt_tokens: int, completion_tokens: int) -> Json:
    """OpenAI's counts of an answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def error_body(message: str, kind: str, param: str | None, code: str | None) -> Json:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_card(model: str, created: int) -> Json:
    """An entry of /v1/models."""
    return {"id": model, "object": "model", "created": created, "owned_by": "flexspec"}


def _envelope(form: Format, kind: str, choices: list[Json]) -> Json:
    return {"id": form.answer_id, "object": kind, "created": form.created, "model": form.model, "choices": choices}


def _choice(index: int, key: str, value: object, reason: str | None) -> Json:
    return {"index": index, key: value, "logprobs": None, "finish_reason": reason}

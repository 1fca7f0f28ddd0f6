"""POST /tokenize and /detokenize, in vLLM's form: what the model reads, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from flexspec.errors import RequestError
from flexspec.runtime.engine.api import check_prompt_ids
from flexspec.runtime.server.bodies.messages import parse_messages, refuse_unencodable, refused_message_keys
from flexspec.runtime.server.bodies.neutral import equal_to
from flexspec.runtime.server.openai import Json
from flexspec.runtime.server.requests import ChatRenderer, ServerLimits, Tokenizer, render_prompt, validate

_NEUTRAL = {
    "add_generation_prompt": equal_to(True),
    "chat_template_kwargs": equal_to({}),
    "continue_final_message": equal_to(False),
    "return_token_strs": equal_to(False),
    "tools": equal_to([]),
}


class TokenizeBody(BaseModel):
    """A prompt, or the messages of a chat."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(BaseModel):
    """Token ids."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: list[int]


def tokenize(body: Mapping[str, object], tokenizer: Tokenizer, chat: ChatRenderer | None, limits: ServerLimits) -> Json:
    """Ids of a prompt as /v1/completions would read it, or of messages as a chat would. Raises RequestError."""
    parsed = validate(TokenizeBody, body, _NEUTRAL, refused_message_keys(body.get("messages")))
    if (parsed.prompt is None) == (parsed.messages is None):
        raise RequestError("both or none of prompt and messages", "one of them", "send a prompt", param="prompt")
    if parsed.messages is not None:
        ids = render_prompt(parse_messages(parsed.messages), tokenizer, chat)
    else:
        prompt = parsed.prompt or ""
        refuse_unencodable(prompt, "prompt")
        ids = tokenizer.encode(prompt, parsed.add_special_tokens)
    return {"count": len(ids), "max_model_len": limits.context_tokens, "tokens": ids}


def detokenize(body: Mapping[str, object], tokenizer: Tokenizer) -> Json:
    """The text of token ids. Raises RequestError."""
    tokens = validate(DetokenizeBody, body, {}).tokens
    if tokens:
        try:
            check_prompt_ids(tokens, tokenizer.vocab_size)
        except RequestError as error:
            raise RequestError(error.found, error.expected, error.fix, param="tokens") from None
    return {"prompt": tokenizer.decode(tokens)}

"""Prompts and answers that do not fit the context, refused in the words that clients of OpenAI's API look for."""

from __future__ import annotations

from flexspec.errors import CapacityError


def check_fits(prompt_tokens: int, max_tokens: int | None, context_tokens: int) -> None:
    """Raise CapacityError for a prompt that leaves no room, or not as much as the request asks for.

    ``max_tokens`` None: the request takes what is left.
    """
    limit = f"This model's maximum context length is {context_tokens} tokens"
    if prompt_tokens >= context_tokens:
        found = f"{limit}. However, your prompt has {prompt_tokens} tokens"
        raise CapacityError(found, "a prompt with room for an answer", "shorten the prompt")
    if max_tokens is not None and prompt_tokens + max_tokens > context_tokens:
        found = (
            f"{limit}. However, you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, "
            f"{max_tokens} in the completion)"
        )
        raise CapacityError(found, "both within the context", "shorten the prompt, lower max_tokens or leave it out")

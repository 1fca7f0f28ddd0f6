"""Parameters that are not offered: each is refused by name, none is ignored.

Owns the table of OpenAI parameters that are not offered, and of their values without effect, which clients send by
habit and which are therefore accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flexspec.errors import RequestError

_BOTH: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
}

# Values without effect, besides null.
CHAT_NEUTRAL: dict[str, tuple[object, ...]] = {
    **_BOTH,
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
    "verbosity": (),
    "web_search_options": (),
}

TEXT_NEUTRAL: dict[str, tuple[object, ...]] = {
    **_BOTH,
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}

# Keys of a chat message that OpenAI's answers carry and that clients send back in the next turn.
MESSAGE_NEUTRAL: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


class UnsupportedError(RequestError):
    """A parameter or value that this server does not offer, or an unknown one."""


def refuse_others(
    body: Mapping[str, object], offered: Collection[str], neutral: Mapping[str, tuple[object, ...]], where: str = ""
) -> None:
    """Refuse the first key of ``body`` that is neither offered nor neutral. Raises UnsupportedError naming it.

    ``where`` is the path in front of the key, such as ``messages[0].``.
    """
    for key, value in body.items():
        if key in offered or (key in neutral and (value is None or _has_no_effect(value, neutral[key]))):
            continue
        name = where + key
        if key not in neutral:
            raise UnsupportedError(
                f"unknown parameter {name!r}", f"one of {', '.join(sorted(offered))}", f"leave {name} out", param=name
            )
        raise UnsupportedError(
            f"{name}={shown(value)}", "a request without it: it is not offered", f"leave {name} out", param=name
        )


def shown(value: object) -> str:
    """``repr`` cut to a length that fits an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _has_no_effect(value: object, neutral: tuple[object, ...]) -> bool:
    # Not plain equality: False == 0 in Python, but logprobs=0 asks for something and logprobs=false does not.
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)

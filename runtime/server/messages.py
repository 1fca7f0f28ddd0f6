"""Chat messages: roles and contents that templates know; errors name the place of anything else in the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexspec.errors import RequestError
from flexspec.runtime.server.refusals import MESSAGE_NEUTRAL, UnsupportedError, refuse_others, shown

ROLES = ("system", "user", "assistant")


def parse_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, str]]:
    """Messages with a role and one text each; text parts are joined by newlines. Raises RequestError with the place."""
    if not messages:
        raise RequestError("no messages", "at least one message", "send a message", param="messages")
    return [_parse_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def refuse_unencodable(text: str, param: str) -> None:
    """Raise RequestError for half a surrogate pair: JSON can spell one, UTF-8 (so the tokenizer) cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"half a surrogate pair in {param} at character {error.start}", "valid Unicode text",
            "send whole characters (a cut emoji is the usual cause)", param=param,
        ) from None  # fmt: skip


def _parse_message(message: Mapping[str, object], where: str) -> dict[str, str]:
    refuse_others(message, ("role", "content"), MESSAGE_NEUTRAL, where + ".")
    role = message.get("role")
    if role not in ROLES:
        raise UnsupportedError(
            f"{where}.role={shown(role)}",
            f"one of {', '.join(ROLES)}",
            "send one of these roles",
            param=f"{where}.role",
        )
    text = _text(message.get("content"), f"{where}.content")
    refuse_unencodable(text, f"{where}.content")
    return {"role": str(role), "content": text}


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(
            f"{where}={shown(content)}", "a string or a list of text parts", "send the text as a string", param=where
        )
    return "\n".join(_part_text(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part_text(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        raise UnsupportedError(
            f"a content part of type {shown(kind)}", "parts of type 'text': images, audio and files are not offered",
            "send text only", param=f"{where}.type",
        )  # fmt: skip
    refuse_others(part, ("type", "text"), {}, where + ".")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text={shown(text)}", "a string", "send the part's text", param=f"{where}.text")
    return text

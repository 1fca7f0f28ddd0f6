"""Chat messages: roles and contents that templates know; errors name the place of anything else in the request.

Turns of tools are history: an assistant's ``tool_calls`` and the ``tool`` messages that answer them go to a template
that knows them, and are written as plain text for one that does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flexspec.errors import RequestError
from flexspec.runtime.server.bodies.neutral import MESSAGE_NEUTRAL, PART_NEUTRAL, TOOL_CALL_NEUTRAL
from flexspec.runtime.server.bodies.refusals import Refused, UnsupportedError, refused_keys, shown

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}  # templates know the names on the right
_PASSED = ("name", "reasoning_content", "reasoning", "tool_call_id")  # to the template as they are, if text
MESSAGE_KEYS = ("role", "content", "tool_calls", "function_call", "refusal", *_PASSED)


def refused_message_keys(messages: object) -> list[Refused]:
    """Keys of messages, of their parts and tool calls that are not offered. Takes anything: types are checked later."""
    refused = []
    for place, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            where = f"messages[{place}]."
            refused += refused_keys(message, MESSAGE_KEYS, MESSAGE_NEUTRAL, where, "messages.")
            refused += _refused_inside(message, "content", ("type", "text", "refusal"), PART_NEUTRAL, where)
            refused += _refused_inside(message, "tool_calls", ("id", "type", "function"), TOOL_CALL_NEUTRAL, where)
    return refused


def _refused_inside(message: Message, key: str, offered: Sequence[str], neutral: Any, where: str) -> list[Refused]:
    items = message.get(key)
    if not isinstance(items, list):
        return []
    refused = []
    for place, item in enumerate(items):
        if isinstance(item, dict) and item.get("type", "text") in ("text", "refusal", "function"):
            refused += refused_keys(item, offered, neutral, f"{where}{key}[{place}].", f"messages.{key}.")
    return refused


def parse_messages(messages: Sequence[Mapping[str, object]]) -> list[Message]:
    """Messages with a role and one text each; text parts are joined by newlines. Raises RequestError with the place.

    ``refused_message_keys`` comes before: keys are not looked at again.
    """
    if not messages:
        raise RequestError("no messages", "at least one message", "send a message", param="messages")
    return [_parse_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def spell_tool_turns(messages: Sequence[Message]) -> list[Message]:
    """For a template without tools: calls as JSON lines of the assistant's text, their results as user turns."""
    spelled = []
    for message in messages:
        turn = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        if message["role"] == "tool":
            turn["role"] = "user"
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        turn["content"] = "\n".join([*([turn["content"]] if turn["content"] or not calls else []), *calls])
        spelled.append(turn)
    return spelled


def refuse_unencodable(text: str, param: str) -> None:
    """Raise RequestError for half a surrogate pair: JSON can spell one, UTF-8 (so the tokenizer) cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"half a surrogate pair in {param} at character {error.start}", "valid Unicode text",
            "send whole characters (a cut emoji is the usual cause)", param=param,
        ) from None  # fmt: skip


def _parse_message(message: Mapping[str, object], where: str) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise UnsupportedError(
            f"{where}.role={shown(role)}", f"one of {', '.join(ROLES)}", "send one of these roles",
            param=f"{where}.role", counted=("messages.role",),
        )  # fmt: skip
    parsed: Message = {"role": _TEMPLATE_ROLES.get(str(role), role)}
    parsed["content"] = _content(message, role == "assistant", where)
    for key in _PASSED:
        if message.get(key) is not None:
            parsed[key] = _string(message[key], f"{where}.{key}")
    calls = _tool_calls(message, where)
    if calls and role != "assistant":
        raise RequestError(
            f"tool calls of role {role}", "those of an assistant", "leave them out", param=f"{where}.tool_calls"
        )
    if calls:
        parsed["tool_calls"] = calls
    return parsed


def _content(message: Mapping[str, object], assistant: bool, where: str) -> str:
    """The text of a message; an assistant's may be missing, as clients replay what they got."""
    content = message.get("content")
    if assistant and content in (None, [], ""):
        refusal = message.get("refusal")
        return "" if refusal is None else _string(refusal, f"{where}.refusal")
    text = _text(content, f"{where}.content")
    refuse_unencodable(text, f"{where}.content")
    return text


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
    if not isinstance(part, dict) or kind not in ("text", "refusal"):
        raise UnsupportedError(
            f"a content part of type {shown(kind)}", "parts of type 'text': images, audio and files are not offered",
            "send text only", param=f"{where}.type", counted=("messages.content.type",),
        )  # fmt: skip
    text = part.get(kind)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{kind}={shown(text)}", "a string", "send the part's text", param=f"{where}.{kind}")
    return text


def _string(value: object, param: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{param}={shown(value)}", "a string", "send a string", param=param)
    refuse_unencodable(value, param)
    return value


def _tool_calls(message: Mapping[str, object], where: str) -> list[Message]:
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls={shown(calls)}", "a list", "send the list", param=f"{where}.tool_calls")
    parsed = [_tool_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls or ())]
    legacy = message.get("function_call")
    if legacy is not None:
        parsed.append({"type": "function", "function": _function(legacy, f"{where}.function_call")})
    return parsed


def _tool_call(call: object, where: str) -> Message:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise UnsupportedError(
            f"{where}={shown(call)}", "a call of type 'function'", "send calls of functions only", param=where,
            counted=("messages.tool_calls.type",),
        )  # fmt: skip
    parsed: Message = {"type": "function", "function": _function(call.get("function"), f"{where}.function")}
    if call.get("id") is not None:
        parsed["id"] = _string(call["id"], f"{where}.id")
    return parsed


def _function(function: object, where: str) -> Message:
    if not isinstance(function, dict):
        raise RequestError(f"{where}={shown(function)}", "an object with name and arguments", "send both", param=where)
    name = _string(function.get("name"), f"{where}.name")
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        arguments = _arguments(_string("" if arguments is None else arguments, f"{where}.arguments"))
    return {"name": name, "arguments": arguments}


def _arguments(text: str) -> Any:
    """Templates expect an object where OpenAI has its JSON; text that is no object stays as the model wrote it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text

"""Chat templates: messages to prompt text with sandboxed Jinja, with the names and filters of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flexspec.errors import RequestError, TokenizerError

_MARKER = "a text to look for"


class _Refusal(jinja2.TemplateError):
    """The template's own ``raise_exception``."""


class _GenerationBlock(Extension):
    """``{% generation %}`` marks assistant text for training; here its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatRenderer:
    """One model's chat template with its special tokens (``LoadedModel.special_tokens``)."""

    def __init__(self, template: str, specials: Mapping[str, str]) -> None:
        """Raises TokenizerError if the template does not compile."""
        self._template = template
        self._specials = dict(specials)
        _compile(template)

    @property
    def knows_tools(self) -> bool:
        """Whether the template writes an assistant's calls of tools; one that does not would drop them."""
        return "tool_calls" in self._template

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that asks for the assistant's next turn. Raises RequestError if the template refuses."""
        return render_chat(self._template, messages, add_generation_prompt=True, **self._specials)


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **specials: str
) -> str:
    """Render ``messages`` ({"role", "content"}) as the model's prompt text.

    ``specials`` are texts such as bos_token and eos_token. The text has BOS if the template writes it; encode it
    with ``Tokenizer.encode(text, add_special=True)``, which adds BOS only if it is missing. Raises TokenizerError for a
    template that does not compile or breaks out of the sandbox, RequestError for messages that it cannot render.
    """
    if not messages:
        raise RequestError("no messages", "at least one message", "send a user message", param="messages")
    compiled = _compile(template)
    as_parts = _wants_parts(template, tuple(sorted(specials.items())))
    try:
        return compiled.render(
            messages=[_in_parts(message) for message in messages] if as_parts else list(messages),
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **specials,
        )
    except _Refusal as error:
        found = f"messages that the model's chat template refuses ({error})"
        raise RequestError(found, "messages in the template's order", "change the messages", param="messages") from None
    except SecurityError as error:
        raise _unusable(f"reaches outside the sandbox ({error})") from None
    except Exception as error:  # a template can raise anything that an expression can
        found = f"messages that the model's chat template cannot render ({type(error).__name__}: {str(error)[:200]})"
        fix = "send roles user, assistant and system with text as content"
        raise RequestError(found, "messages with a role and text content", fix, param="messages") from None


@lru_cache(maxsize=16)
def _wants_parts(template: str, specials: tuple[tuple[str, str], ...]) -> bool:
    """Whether a user's text comes through as a list of parts and not as a string; found by rendering it both ways."""

    def comes_through(content: str | list[dict[str, str]]) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            text = _compile(template).render(messages=messages, add_generation_prompt=True, **dict(specials))
        except Exception:  # a template can raise anything that an expression can; the request itself reports it
            return False
        return _MARKER in text

    return not comes_through(_MARKER) and comes_through([{"type": "text", "text": _MARKER}])


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except RecursionError:
        raise _unusable("is nested too deeply") from None
    except Exception as error:  # Python compiles what Jinja writes, and has limits of its own (digits, indentation)
        raise _unusable(f"does not compile ({type(error).__name__}: {str(error)[:200]})") from None


def _unusable(problem: str) -> TokenizerError:
    return TokenizerError(f"a chat template that {problem}", "a valid Jinja template", "use the model's own template")


def _raise(message: str) -> NoReturn:
    raise _Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; chat templates want plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

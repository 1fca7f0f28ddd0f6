"""``flexspec.LLM``: runs an artifact in this process, from prompts to completions."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from flexspec.errors import EngineError, RequestError
from flexspec.host.causes import typed_errors
from flexspec.runtime.engine.api import Delta
from flexspec.runtime.engine.complete import Completion
from flexspec.runtime.open.engine import open_engine
from flexspec.runtime.open.serve_options import ServeOptions, prepare
from flexspec.runtime.open.served import Messages, Params, Served
from flexspec.runtime.text.tokenizer import Tokenizer
from flexspec.sampling import SamplingParams

Prompt = str | Sequence[int] | Messages  # a text to continue, token ids, or a chat
_KINDS = "a text, a list of token ids, or a list of messages ({'role': ..., 'content': ...})"


class LLM:
    """An opened artifact. Requests run in the calling thread, several together; calls may come from any thread.

    A context manager: at its end, or in :meth:`close`, running requests are cancelled and memory is freed.
    """

    @typed_errors()
    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Open the artifact ``path`` (NAME.fspec, from ``flexspec.compile`` or the command).

        ``options`` are the fields of ``ServeOptions``: draft, device, threads, kv_tokens, max_requests, context_tokens
        and so on. Raises RequestError for an unknown option or an invalid draft plan, CapacityError for impossible
        numbers, ArtifactError, and ToolchainError for a missing device.
        """
        self._served: Served | None = open_engine(Path(path), read_options(options))

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[Completion]:
        """Run one or more prompts together; completions are in the order of the prompts.

        A text is continued unchanged, a chat gets the assistant's next turn. ``params``: one for all prompts (default:
        greedy, at most 128 tokens) or a list with one per prompt. Speculation never changes a completion. Raises
        RequestError or CapacityError before anything runs, for a prompt that can never run, and EngineError if the
        engine fails.
        """
        served = self._opened
        return served.generate([_flat(served, prompt) for prompt in _listed(prompts)], params)

    def chat(self, messages: Messages | Sequence[Messages], params: Params = None) -> list[Completion]:
        """The assistant's next turn in one or more chats. Raises the errors of :meth:`generate`, and RequestError for a
        model without a chat template."""
        chats = _listed(messages)
        wrong = next((chat for chat in chats if not _is_chat(chat)), None)
        if wrong is not None:
            raise _no_prompt(wrong, "a list of messages ({'role': ..., 'content': ...})")
        return self.generate(chats, params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """One prompt's text as it is committed: an iterator of deltas (text, token_ids; the last one with
        finish_reason and stats).

        The request runs while the caller reads. It is cancelled when the caller leaves the loop, by ``break`` or an
        exception, and its memory is free for the next call. Raises the errors of :meth:`generate`.
        """
        served = self._opened
        return served.stream(_flat(served, prompt), params)

    @property
    def name(self) -> str:
        """The model's name."""
        return self._opened.name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._opened.tokenizer

    @property
    def context_tokens(self) -> int:
        """Maximum tokens of a prompt and its completion together."""
        return self._opened.context_tokens

    @property
    def draft(self) -> str:
        """The draft plan in force; "off" without speculation."""
        return str(self._opened.draft)

    def close(self) -> None:
        """Cancel running requests and free all memory. Idempotent."""
        served, self._served = self._served, None
        if served is not None:
            served.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._served is None:
            return "LLM(closed)"
        return f"LLM({self.name!r}, {self._served.isa}, draft {self.draft}, context {self.context_tokens})"

    @property
    def _opened(self) -> Served:
        if self._served is None:
            raise EngineError("a closed LLM", "an open one", "open the artifact again")
        return self._served


def read_options(options: Mapping[str, object]) -> ServeOptions:
    """ServeOptions from keywords. Raises RequestError for an unknown name or a wrong type, and CapacityError."""
    known: dict[str, Field[Any]] = {field.name: field for field in fields(ServeOptions)}
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {near[0]}?" if near else "leave it out"
            raise RequestError(f"option {name}", f"one of {', '.join(known)}", fix, param=name)
        kind = type(known[name].default)
        if type(value) is not kind:
            raise RequestError(f"{name}={value!r}", f"a value of type {kind.__name__}", "pass one", param=name)
    return prepare(ServeOptions(**cast(dict[str, Any], options)))


def _listed(prompts: Any) -> list[Any]:
    """One or more prompts as a list."""
    if not _is_many(prompts) and not isinstance(prompts, str):
        raise _no_prompt(prompts, f"{_KINDS}, or a list of these")
    return [prompts] if isinstance(prompts, str) or _is_ids(prompts) or _is_chat(prompts) else list(prompts)


def _flat(served: Served, prompt: Any) -> str | Sequence[int]:
    """A prompt as text or ids: a chat goes through the model's template."""
    if isinstance(prompt, str) or _is_ids(prompt):
        return cast(str | Sequence[int], prompt)
    if _is_chat(prompt):
        return served.chat_prompt(prompt)
    raise _no_prompt(prompt, _KINDS)


def _is_many(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_ids(value: Any) -> bool:
    return _is_many(value) and len(value) > 0 and all(type(item) is int for item in value)


def _is_chat(value: Any) -> bool:
    return _is_many(value) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def _no_prompt(value: object, expected: str) -> RequestError:
    return RequestError(f"a prompt {value!r:.80}", expected, "pass one of these", param="prompt")

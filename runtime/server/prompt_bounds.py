"""Bounds on the work that one prompt may cost before the engine sees it: tokenizing and rendering.

Both grow with the text, not with the context, and hold the interpreter: a prompt of megabytes would stop every stream
for seconds and keep gigabytes. So a prompt that cannot fit is refused by its size, and one that may not fit is
tokenized in pieces, between which other threads run, until that is certain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from flexspec.errors import CapacityError
from flexspec.runtime.server.bodies.messages import Message
from flexspec.runtime.server.requests import ChatRenderer, Tokenizer

_PIECE = 1 << 15  # characters: 10 to 60 ms, whatever they are
_EDGE = 2  # tokens that a cut between pieces may add: a word's two halves, or a blank by itself


class BoundedTokenizer:
    """A tokenizer that refuses texts of more than ``context_tokens`` tokens. Raises CapacityError for them."""

    def __init__(self, tokenizer: Tokenizer, context_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def longest_token_bytes(self) -> int | None:
        return self._tokenizer.longest_token_bytes

    def encode(self, text: str, add_special: bool) -> list[int]:
        if len(text) > _PIECE:
            self.check_size([text])
            self._check_tokens(text)
        return self._tokenizer.encode(text, add_special)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(ids)

    def check_size(self, texts: Sequence[str]) -> None:
        """Refuse texts that together have more bytes than the context's tokens can spell."""
        if sum(map(len, texts)) <= _PIECE or (longest := self.longest_token_bytes) is None:
            return
        size = sum(len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if size > self._context_tokens * longest:
            raise self._too_long(f"{size} bytes, and a token has at most {longest}")

    def check_count(self, messages: object) -> None:
        """Refuse a chat with more messages than the context has tokens."""
        if isinstance(messages, list) and len(messages) > self._context_tokens:
            raise self._too_long(f"{len(messages)} messages")

    def _check_tokens(self, text: str) -> None:
        count = 0
        for piece in _pieces(text):
            count += len(self._tokenizer.encode(piece, False)) - _EDGE
            if count > self._context_tokens:
                raise self._too_long(f"more than {count} tokens")

    def _too_long(self, size: str) -> CapacityError:
        found = f"This model's maximum context length is {self._context_tokens} tokens. However, your prompt has {size}"
        return CapacityError(found, "a prompt with room for an answer", "shorten the prompt")


class BoundedChat:
    """A chat renderer that refuses messages whose texts cannot fit before it renders them."""

    def __init__(self, chat: ChatRenderer, tokenizer: BoundedTokenizer) -> None:
        self._chat = chat
        self._tokenizer = tokenizer

    @property
    def knows_tools(self) -> bool:
        return self._chat.knows_tools

    def render(self, messages: Sequence[Message]) -> str:
        self._tokenizer.check_size([text for message in messages if isinstance(text := message.get("content"), str)])
        return self._chat.render(messages)


def _pieces(text: str) -> Iterator[str]:
    """``text`` in pieces, cut in front of a blank where there is one."""
    start = 0
    while start < len(text):
        end = start + _PIECE
        if end < len(text):
            blank = text.rfind(" ", start + 1, end)
            end = blank if blank > start else end
        yield text[start:end]
        start = end

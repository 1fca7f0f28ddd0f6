"""Text to token ids and back, and the streaming detokenizer that never shows half a character.

Ids become text through bytes: every token stands for fixed bytes (byte-level BPE) or text with byte tokens (byte
fallback), so streaming needs one table look-up and one incremental UTF-8 step per token. Owns no model policy: which
ids end a reply is passed in.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import tokenizers

from flexspec.errors import RequestError, TokenizerError
from flexspec.runtime.text.token_lengths import bytes_factor

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_FIX = "check the model's tokenizer.json, or convert the model again"
_T = TypeVar("_T")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where printable, else the next code point from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(rest)}


_ALPHABET = _byte_level_alphabet()


class Tokenizer:
    """A `tokenizers` file with this project's rules for special tokens. Thread-safe after construction."""

    def __init__(self, tokenizer_json: bytes, eos_ids: Sequence[int] = (), bos_id: int | None = None) -> None:
        """``eos_ids`` and ``bos_id`` come from the model's configuration. Raises TokenizerError for a bad file."""
        self._inner: Any = _guarded(lambda: tokenizers.Tokenizer.from_buffer(tokenizer_json))
        self._inner.no_truncation()  # some files carry the limits of the training run
        self._inner.no_padding()
        self.eos_ids = tuple(eos_ids)
        self.bos_id = bos_id
        added = self._inner.get_added_tokens_decoder()
        self._special = {token for token, info in added.items() if info.special} | set(eos_ids)
        if bos_id is not None:
            self._special.add(bos_id)
        self._vocab: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocab.values(), default=-1) + 1
        settings = json.loads(tokenizer_json)
        self._rules = _DecodeRules(settings.get("decoder"))
        self._bytes_factor = bytes_factor(settings)
        self._bytes: dict[int, bytes] = {}
        prefix: list[int] = _guarded(lambda: self._inner.encode("", add_special_tokens=True).ids)
        while prefix and prefix[-1] in self.eos_ids and prefix[-1] != bos_id:
            prefix.pop()  # an end-of-sequence token after a prompt would end the reply before it begins
        self._prefix = prefix

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Token ids of ``text``; texts of special tokens count as those tokens.

        With ``add_special`` the tokenizer's own prefix (BOS, if it has one) comes first, except for the part that the
        text already begins with: a chat template that writes BOS itself still gives exactly one. Raises RequestError
        for text that is not Unicode (lone surrogates).
        """
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise RequestError("text with a lone surrogate", "valid Unicode", "send whole UTF-16 pairs")
        ids: list[int] = _guarded(lambda: self._inner.encode(text, add_special_tokens=False).ids)
        if not add_special:
            return ids
        return self._prefix + ids[_common(self._prefix, ids) :]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The whole text of ``ids``; bytes that are not UTF-8 show as U+FFFD, unknown ids as nothing."""
        detokenizer = Detokenizer(self, skip_special=skip_special, start_of_text=True)
        return detokenizer.push(ids) + detokenizer.flush()

    def token(self, token_id: int) -> str | None:
        """The token's own spelling in the vocabulary, or None for an id without a token (padding rows)."""
        text: str | None = self._inner.id_to_token(token_id)
        return text

    def token_id(self, token: str) -> int | None:
        return self._vocab.get(token)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for (a special token's text); empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            text = self.token(token_id)
            known = b"" if text is None else self._rules.to_bytes(text)
            self._bytes[token_id] = known
        return known

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """Most bytes of a text that one token can stand for; None where there is no bound."""
        if self._bytes_factor is None:
            return None
        return self._bytes_factor * max((len(self.token_bytes(token)) for token in self._vocab.values()), default=1)

    def leading_spaces_dropped(self) -> int:
        """How many leading spaces the tokenizer puts before a text and decoding removes."""
        return self._rules.strip


def _common(first: list[int], second: list[int]) -> int:
    """How many tokens both lists begin with."""
    most = min(len(first), len(second))
    return next((i for i in range(most) if first[i] != second[i]), most)


class Detokenizer:
    """Streams text: each push returns the characters its tokens complete, never a part of one.

    ``start_of_text``: the ids begin a text, so the space that SentencePiece models put before it is taken off; leave it
    False for a continuation, whose first space is real.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, start_of_text: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.leading_spaces_dropped() if start_of_text else 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Text completed by these tokens. Bytes of an unfinished character are kept for the next push."""
        tokenizer = self._tokenizer
        data = b"".join(
            tokenizer.token_bytes(token)
            for token in token_ids
            if not (self._skip_special and tokenizer.is_special(token))
        )
        return self._stripped(self._decoder.decode(data))

    def hidden(self, token: int) -> str:
        """The text of a special token, which ``push`` leaves out; empty for all others."""
        tokenizer = self._tokenizer
        if not (self._skip_special and tokenizer.is_special(token)):
            return ""
        return tokenizer.token_bytes(token).decode(errors="replace")

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character, else nothing."""
        text = self._stripped(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        return text

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class _DecodeRules:
    """The decoder part of a tokenizer.json, read as a map from one token to its bytes."""

    def __init__(self, decoder: Any) -> None:
        self.byte_level = False
        self.byte_fallback = False
        self.replacements: list[tuple[str, str]] = []
        self.strip = 0
        table: dict[str, Any] = decoder if isinstance(decoder, dict) else {}
        for step in table["decoders"] if table.get("type") == "Sequence" else [table]:
            self._add(step)

    def _add(self, step: dict[str, Any]) -> None:
        kind = step.get("type")
        if kind == "ByteLevel":
            self.byte_level = True
        elif kind == "ByteFallback":
            self.byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            self.replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            self.replacements.append((step["replacement"], " "))
            self.strip = 0 if step.get("prepend_scheme") == "never" else 1
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            self.strip = step["start"]
        elif kind != "Fuse":
            found = f"a tokenizer whose decoder has a step of type {kind}"
            raise TokenizerError(found, "ByteLevel, or Replace/ByteFallback/Fuse/Strip/Metaspace", _FIX)

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            # as in the tokenizers library: an added token with characters outside the alphabet is plain text
            if all(char in _ALPHABET for char in token):
                return bytes(_ALPHABET[char] for char in token)
            return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


def _guarded(call: Callable[[], _T]) -> _T:
    """Run a call into the tokenizers library; its errors, panics of its Rust code included, become TokenizerError."""
    try:
        return call()
    except Exception as error:
        raise TokenizerError(f"a tokenizer that fails ({str(error)[:200]})", "a valid tokenizer.json", _FIX) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3 derives it from BaseException and exports no name for it
            raise
        raise TokenizerError(f"a tokenizer that fails ({str(error)[:200]})", "a valid tokenizer.json", _FIX) from None

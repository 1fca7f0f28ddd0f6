"""Prompts that cannot fit are refused before they are tokenized or rendered, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import PlainChat
from tiny_models import random_weights, write_gguf

from flexspec.compiler.frontends.open_model import open_model
from flexspec.errors import CapacityError
from flexspec.runtime.server.prompt_bounds import BoundedChat, BoundedTokenizer
from flexspec.runtime.text.token_lengths import bytes_factor
from flexspec.runtime.text.tokenizer import Tokenizer

CONTEXT = 8192
PIECE = 1 << 15


class Counting:
    """A tokenizer that counts the characters it was given; a token for every ``characters`` of them."""

    vocab_size = 10

    def __init__(self, longest_token_bytes: int | None, characters: int = 4) -> None:
        self.longest_token_bytes = longest_token_bytes
        self.characters = characters
        self.seen = 0
        self.largest = 0

    def encode(self, text: str, add_special: bool) -> list[int]:
        self.seen += len(text)
        self.largest = max(self.largest, len(text))
        return [1] * -(-len(text) // self.characters)

    def decode(self, ids: Iterable[int]) -> str:
        return "x" * len(list(ids))


@pytest.mark.parametrize("text", ["a b " * 1_975_000, "a" * 7_900_000, "\u00e9" * 3_950_000, " " * 7_900_000])
def test_what_cannot_fit_is_not_tokenized_at_all(text: str) -> None:
    tokenizer = Counting(longest_token_bytes=64)
    with pytest.raises(
        CapacityError, match=r"maximum context length is 8192 tokens\. However, your prompt has 7900000 b"
    ):
        BoundedTokenizer(tokenizer, CONTEXT).encode(text, True)
    assert tokenizer.seen == 0


@pytest.mark.parametrize("longest", [None, 1000])
def test_what_may_fit_is_tokenized_until_it_is_certain_that_it_does_not(longest: int | None) -> None:
    tokenizer = Counting(longest)
    with pytest.raises(CapacityError, match="more than"):
        BoundedTokenizer(tokenizer, CONTEXT).encode("word " * 1_000_000, False)
    assert tokenizer.largest <= PIECE and tokenizer.seen <= CONTEXT * 4 + 2 * PIECE


@pytest.mark.parametrize("length", [0, 1, PIECE, PIECE + 1, 8192 * 9])
def test_what_fits_is_tokenized_whole(length: int) -> None:
    tokenizer = Counting(64, characters=9)
    text = ("word " * (length // 5 + 1))[:length]
    assert BoundedTokenizer(tokenizer, CONTEXT).encode(text, False) == [1] * -(-length // 9)
    assert tokenizer.largest == length


def test_a_chat_is_refused_before_it_is_rendered() -> None:
    bounded = BoundedTokenizer(Counting(64), CONTEXT)

    class Never(PlainChat):
        def render(self, messages: Any) -> str:
            raise AssertionError("rendered")

    message = {"role": "user", "content": "a" * 60_000}
    with pytest.raises(CapacityError, match="600000 bytes"):
        BoundedChat(Never(), bounded).render([message] * 10)
    with pytest.raises(CapacityError, match="9000 messages"):
        bounded.check_count([message] * 9000)
    assert BoundedChat(PlainChat(), bounded).render([message]).startswith("<user>aaa")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("unit", ["a", "hello ", "\u00e9", " ", "\U0001f389", "1234567890", "x\n"])
def test_no_text_has_fewer_tokens_than_its_bound_says(tmp_path: Path, kind: str, unit: str) -> None:
    size = {"gpt2": 268, "llama": 277}[kind]
    model = open_model(write_gguf(tmp_path / "m.gguf", random_weights(size), tokenizer=kind))
    assert model.tokenizer_json is not None
    tokenizer = Tokenizer(model.tokenizer_json)
    text = unit * (50_000 // len(unit))
    longest, count = tokenizer.longest_token_bytes, len(tokenizer.encode(text, False))
    assert longest is not None and len(text.encode()) <= count * longest
    assert BoundedTokenizer(tokenizer, count).encode(text, False) == tokenizer.encode(text, False)
    with pytest.raises(CapacityError):
        BoundedTokenizer(tokenizer, count // 2).encode(text, False)


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({}, 1),
        ({"normalizer": None}, 1),
        ({"normalizer": {"type": "NFC"}}, 4),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}}, 1),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "abc"}, "content": ""}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}}, None),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend"}, {"type": "NFKC"}]}}, 4),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend"}, {"type": "Strip"}]}}, None),
        ({"added_tokens": [{"content": "<mask>", "lstrip": True}]}, None),
        ({"model": {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": False}}, None),
        ({"model": {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}}, 1),
    ],
)
def test_a_tokenizer_that_shortens_texts_has_a_wider_bound_or_none(
    settings: dict[str, Any], factor: int | None
) -> None:
    assert bytes_factor(settings) == factor

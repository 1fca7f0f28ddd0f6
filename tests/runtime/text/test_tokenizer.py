"""Text to ids and back, and streaming: no character is shown in halves, lost, or held longer than its last byte."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import byte_level_tokens, random_weights, sentencepiece_tokens, write_gguf

from flexspec.compiler.frontends.open_model import LoadedModel, open_model
from flexspec.errors import FlexspecError, RequestError, TokenizerError
from flexspec.runtime.server.requests import ServerLimits, read_chat
from flexspec.runtime.text.chat import ChatRenderer
from flexspec.runtime.text.tokenizer import Detokenizer, Tokenizer

KINDS = ["gpt2", "llama"]


def load(folder: Path, kind: str, pre: str = "smollm") -> LoadedModel:
    vocab = len(byte_level_tokens() if kind == "gpt2" else sentencepiece_tokens()[0])
    return open_model(write_gguf(folder / f"{kind}-{pre}.gguf", random_weights(vocab), tokenizer=kind, pre=pre))


def make(folder: Path, kind: str, pre: str = "smollm") -> Tokenizer:
    model = load(folder, kind, pre)
    assert model.tokenizer_json is not None
    return Tokenizer(model.tokenizer_json, model.config.eos_ids, model.config.bos_id)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {kind: make(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tokenizers.Tokenizer]:
    """The same files in the tokenizers library alone, as the oracle of decoding."""
    models = {kind: load(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}
    return {kind: tokenizers.Tokenizer.from_buffer(model.tokenizer_json) for kind, model in models.items()}


def pieces(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token(token) for token in tokenizer.encode(text, False)]


def test_byte_level_pieces(both: dict[str, Tokenizer]) -> None:
    tokenizer = both["gpt2"]
    assert pieces(tokenizer, "hello the 12") == ["hello", "Ġt", "he", "Ġ", "1", "2"]  # smollm: digits one by one
    assert tokenizer.encode("<|im_start|>he<|im_end|>", False) == [1, tokenizer.token_id("he"), 2]
    assert tokenizer.encode("", True) == []


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["12", "12"]),
        ("llama-bpe", ["12", "1", "2"]),
        ("qwen2", ["1", "2", "1", "2"]),
        ("default", ["12", "1", "2"]),
    ],
)
def test_split_rules_of_digits(tmp_path: Path, pre: str, expected: list[str]) -> None:
    tokenizer = make(tmp_path, "gpt2", pre)
    assert [piece for piece in pieces(tokenizer, "1212") if piece != "<|im_start|>"] == expected


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "default", "smollm"])
def test_split_rules_give_text_back(tmp_path: Path, pre: str) -> None:
    tokenizer = make(tmp_path, "gpt2", pre)
    for text in ["don't  STOP'S\n\n x\r\n1234567 $+<=>^~|?!", "\u3000日本語 é ①½ 🙂\u200d", "  \t lead", "trail  "]:
        assert tokenizer.decode(tokenizer.encode(text, False)) == text
    composed = tokenizer.decode(tokenizer.encode("e\u0301", False))
    assert composed == ("é" if pre == "qwen2" else "e\u0301")  # Qwen normalises to NFC


def test_sentencepiece_pieces(both: dict[str, Tokenizer]) -> None:
    tokenizer = both["llama"]
    assert pieces(tokenizer, "hello world") == ["▁hello", "▁", "w", "o", "r", "l", "d"]
    assert pieces(tokenizer, "🙂") == ["▁", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert tokenizer.encode("hello", True) == [1, tokenizer.token_id("▁hello")]
    assert tokenizer.encode("", True) == [1]
    assert tokenizer.decode(tokenizer.encode("hello", True)) == "hello"


def test_exactly_one_bos(both: dict[str, Tokenizer]) -> None:
    tokenizer = both["llama"]
    once = tokenizer.encode("hello", True)
    assert tokenizer.encode("<s>hello", True).count(1) == 1  # a template that writes BOS itself
    assert once[0] == 1 and once.count(1) == 1
    assert tokenizer.encode("hello", False).count(1) == 0


@pytest.mark.parametrize("writes_bos", [True, False])
def test_a_chat_prompt_has_one_bos_whether_or_not_the_template_writes_it(
    both: dict[str, Tokenizer], writes_bos: bool
) -> None:
    """The server's own path, over a real template and a tokenizer that adds BOS."""
    template = "{{ bos_token }}" * writes_bos + "{% for m in messages %}{{ m.content }}{% endfor %}"
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    ask = read_chat(body, both["llama"], ChatRenderer(template, {"bos_token": "<s>"}), ServerLimits(256))
    assert ask.samples[0].prompt_ids == [1, both["llama"].token_id("▁hello")]
    without = read_chat(body, both["gpt2"], ChatRenderer("{{ messages[0].content }}", {}), ServerLimits(256))
    assert without.samples[0].prompt_ids == [both["gpt2"].token_id("hello")]  # a tokenizer that adds none gets none


def test_a_prefix_is_completed_not_repeated(tmp_path: Path) -> None:
    """A tokenizer that begins a text with two tokens, and a template that writes the first of them."""
    model = load(tmp_path, "llama")
    assert model.tokenizer_json is not None
    document = json.loads(model.tokenizer_json)
    post = document["post_processor"]
    post["single"].insert(1, {"SpecialToken": {"id": "<unk>", "type_id": 0}})
    post["special_tokens"]["<unk>"] = {"id": "<unk>", "ids": [0], "tokens": ["<unk>"]}
    tokenizer = Tokenizer(json.dumps(document).encode(), model.config.eos_ids, model.config.bos_id)
    hello = tokenizer.token_id("▁hello")
    for text in ("hello", "<s>hello"):
        assert tokenizer.encode(text, True) == [1, 0, hello]


def test_an_eos_behind_the_prompt_is_not_added(tmp_path: Path) -> None:
    model = load(tmp_path, "llama")
    assert model.tokenizer_json is not None
    document = json.loads(model.tokenizer_json)
    post = document["post_processor"]
    post["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    post["special_tokens"]["</s>"] = {"id": "</s>", "ids": [2], "tokens": ["</s>"]}
    tokenizer = Tokenizer(json.dumps(document).encode(), model.config.eos_ids, model.config.bos_id)
    assert tokenizer.encode("hello", True) == [1, tokenizer.token_id("▁hello")]


def test_merges_from_scores_agree_with_transformers() -> None:
    from transformers.convert_slow_tokenizer import generate_merges

    from flexspec.compiler.frontends.tokenizer_gguf import merges_from_scores

    rng = random.Random(5)
    words = {"".join(rng.choice("abc▁") for _ in range(rng.randrange(1, 7))) for _ in range(400)} | set("abc▁")
    tokens = sorted(words)
    scores = [-float(i) for i in rng.sample(range(len(tokens)), len(tokens))]
    theirs = generate_merges({token: i for i, token in enumerate(tokens)}, dict(zip(tokens, scores, strict=True)))
    assert merges_from_scores(tokens, [1] * len(tokens), scores) == [list(pair) for pair in theirs]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, data=st.data())
@example(text="👩‍👩‍👧 🇫🇷 e\u0301 日本語", data=None)
@example(text="\ufffd\x00 \ufffd", data=None)
def test_streamed_text_is_the_decoded_text(
    both: dict[str, Tokenizer],
    library: dict[str, tokenizers.Tokenizer],
    kind: str,
    text: str,
    data: st.DataObject | None,
) -> None:
    tokenizer = both[kind]
    ids = tokenizer.encode(text, False)
    whole = tokenizer.decode(ids)
    assert whole == library[kind].decode(ids, skip_special_tokens=True)
    stream = Detokenizer(tokenizer, start_of_text=True)
    out, at = "", 0
    while at < len(ids):
        step = data.draw(st.integers(1, 4)) if data is not None else 1
        out += stream.push(ids[at : at + step])
        at += step
        assert whole.startswith(out)  # nothing is ever taken back
    assert out + stream.flush() == whole
    if kind == "gpt2":
        assert whole == text


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10**6))
def test_any_ids_stream_as_they_decode(
    both: dict[str, Tokenizer], library: dict[str, tokenizers.Tokenizer], kind: str, seed: int
) -> None:
    """Random ids make invalid UTF-8, special tokens amid characters, and ids past the vocabulary."""
    tokenizer = both[kind]
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(30)]
    for skip in (True, False):
        stream = Detokenizer(tokenizer, skip_special=skip, start_of_text=True)
        out = "".join(stream.push([token]) for token in ids) + stream.flush()
        assert out == tokenizer.decode(ids, skip_special=skip)
        if kind == "gpt2":
            assert out == library[kind].decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_comes_with_its_last_byte(both: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = both[kind]
    ids = [tokenizer.token_id(char) for char in "ðŁĻĤ"] if kind == "gpt2" else [3 + b for b in "🙂".encode()]
    stream = Detokenizer(tokenizer)
    assert [stream.push([token]) for token in ids if token is not None] == ["", "", "", "🙂"]
    assert stream.flush() == ""
    stream.push(ids[:2])  # type: ignore[arg-type]
    assert stream.flush() == "\ufffd"
    assert stream.push([tokenizer.token_id("h") or 0]) == "h"


def test_a_continuation_keeps_its_space(both: dict[str, Tokenizer]) -> None:
    tokenizer = both["llama"]
    hello = tokenizer.token_id("▁hello")
    assert hello is not None
    assert Detokenizer(tokenizer).push([hello]) == " hello"
    assert Detokenizer(tokenizer, start_of_text=True).push([hello]) == "hello"


def test_work_per_token_does_not_grow(both: dict[str, Tokenizer]) -> None:
    """What is kept between pushes is at most three bytes, however long the text."""
    stream = Detokenizer(both["gpt2"])
    held = 0
    for token in range(3, both["gpt2"].vocab_size):
        stream.push([token] * 5)
        held = max(held, len(stream._decoder.getstate()[0]))
    assert held <= 3


def test_special_tokens_and_size(both: dict[str, Tokenizer]) -> None:
    tokenizer = both["gpt2"]
    assert [tokenizer.is_special(token) for token in (0, 1, 2, 3)] == [True, True, True, False]
    assert tokenizer.decode([1, 50, 2]) == tokenizer.decode([50])
    assert tokenizer.decode([1], skip_special=False) == "<|im_start|>"
    assert tokenizer.vocab_size == 3 + 256 + 9


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff", b"[1]", b'{"model": 1}', b'{"version": "1.0", "model": {"type": "BPE"}}']
)
def test_bad_tokenizer_files(data: bytes) -> None:
    with pytest.raises(TokenizerError):
        Tokenizer(data)


def test_unsupported_decoder_is_named() -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    data = json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "decoder": {"type": "WordPiece", "prefix": "#", "cleanup": True},
            "model": model,
        }
    )
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer(data.encode())


def test_damaged_tokenizer_files_fail_cleanly(tmp_path: Path) -> None:
    """Byte flips and cuts of a real file: it works, or one typed error; never a panic of the library's Rust code."""
    rng = random.Random(11)
    outcomes = set()
    for kind in KINDS:
        whole = load(tmp_path, kind).tokenizer_json
        assert whole is not None
        for _ in range(100):
            data = bytearray(whole)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                tokenizer = Tokenizer(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]), (2,), 1)
                tokenizer.decode(tokenizer.encode("hello 🙂 12", True))
                outcomes.add("works")
            except FlexspecError:
                outcomes.add("error")
    assert outcomes == {"works", "error"}


def test_lone_surrogates_are_refused(both: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        both["gpt2"].encode("a\ud83d", False)

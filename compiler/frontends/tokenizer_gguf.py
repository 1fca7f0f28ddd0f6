"""The tokenizer in GGUF metadata as a `tokenizers` JSON file: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

llama.cpp names the splitting rule in ``tokenizer.ggml.pre``; the rules here give the same pieces as the Hugging Face
tokenizers of those models. SentencePiece files have scores instead of merges; the merges are derived as in
transformers' converter (every way to build a piece from two, best score first).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flexspec.errors import TokenizerError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types; 2 unknown, 5 unused, 6 byte
_MAX_PIECE_CHARS = 2048  # the work on a piece grows with the square of its length; real ones have at most 128
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_FIX = "convert the model again with a current llama.cpp"


@dataclass(frozen=True, slots=True)
class _SplitRule:
    """How text is split before the merges: regular expressions applied one after the other to the pieces so far."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_SMOLLM = _SplitRule((r"\p{N}", _GPT2))
_GPT2_RULE = _SplitRule((_GPT2,))
_LLAMA_BPE = _SplitRule((_LLAMA3,), ignore_merges=True, adds_bos=True)
_RULES = {
    "default": _SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": _SplitRule((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": _SplitRule((_QWEN2,), nfc=True),
}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The checked token table of one file."""

    path: Path
    metadata: Mapping[str, Any]
    tokens: list[str]
    types: list[int]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise TokenizerError(f"{self.path} has tokenizer.ggml.{key} = {value!r}", "true or false", _FIX)
        return value

    def token_id(self, key: str) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            found = f"{self.path} has tokenizer.ggml.{key} = {value!r}"
            raise TokenizerError(found, f"an id below {len(self.tokens)}", _FIX)
        return value


def build_tokenizer_json(metadata: Mapping[str, Any], path: Path, vocab_size: int) -> bytes | None:
    """The tokenizer of a GGUF file as `tokenizers` JSON, or None if the file has none.

    ``vocab_size`` is the number of embedding rows. Raises TokenizerError for an unsupported kind or a damaged table.
    """
    model = metadata.get("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model not in ("gpt2", "llama"):
        found = f"{path} has a tokenizer of kind {model!r:.80}"
        raise TokenizerError(found, "gpt2 (byte-level BPE) or llama (SentencePiece BPE)", "use another model")
    vocabulary = _read_vocabulary(metadata, path, vocab_size)
    document = _byte_level(vocabulary) if model == "gpt2" else _sentencepiece(vocabulary)
    return json.dumps(document, ensure_ascii=False, sort_keys=True).encode()


def special_token_texts(metadata: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Texts of the special tokens by the names chat templates use (bos_token, eos_token, unk_token, pad_token)."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return {}
    vocabulary = _Vocabulary(path, metadata, tokens, [])
    ids = {name: vocabulary.token_id(f"{key}_token_id") for name, key in _SPECIALS.items()}
    return {name: tokens[token] for name, token in ids.items() if token is not None}


def _read_vocabulary(metadata: Mapping[str, Any], path: Path, vocab_size: int) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise TokenizerError(f"{path} has no token list", "tokenizer.ggml.tokens, an array of strings", _FIX)
    if len(tokens) > vocab_size:
        found = f"{path} has {len(tokens)} tokens for {vocab_size} embedding rows"
        raise TokenizerError(found, "at most one token per row", _FIX)
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise TokenizerError(f"{path} has the token {twice!r:.80} twice", "different tokens", _FIX)
    if max(map(len, tokens)) > _MAX_PIECE_CHARS:
        found = f"{path} has a token of {max(map(len, tokens))} characters"
        raise TokenizerError(found, f"at most {_MAX_PIECE_CHARS}", _FIX)
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return _Vocabulary(path, metadata, tokens, [_NORMAL] * len(tokens))
    if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu" or len(types) != len(tokens):
        raise TokenizerError(f"{path} has a damaged tokenizer.ggml.token_type", f"{len(tokens)} integers", _FIX)
    return _Vocabulary(path, metadata, tokens, types.tolist())


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    name = vocabulary.get("pre", "default")
    rule = _RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        found = f"{vocabulary.path} splits text by the rule {name!r:.80} (tokenizer.ggml.pre)"
        raise TokenizerError(found, f"one of {', '.join(_RULES)}", "load the model's Hugging Face folder instead")
    merges = vocabulary.get("merges")
    if not isinstance(merges, list):
        raise TokenizerError(f"{vocabulary.path} has no merges", "tokenizer.ggml.merges, an array of strings", _FIX)
    known = set(vocabulary.tokens)
    pairs = []
    for merge in merges:
        left, _, right = merge[:1] + merge[1:].partition(" ")[0], "", merge[1:].partition(" ")[2]
        if left not in known or right not in known or left + right not in known:
            found = f"{vocabulary.path} has the merge {merge!r:.80}"
            raise TokenizerError(found, "two tokens whose union is a token", _FIX)
        pairs.append([left, right])
    splits = [_split(pattern) for pattern in rule.patterns]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _document(
        vocabulary,
        model=_bpe(vocabulary, pairs, ignore_merges=rule.ignore_merges),
        normalizer={"type": "NFC"} if rule.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        decoder=byte_level,
        adds_bos=vocabulary.flag("add_bos_token", rule.adds_bos),
    )


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    scores = vocabulary.get("scores")
    if not isinstance(scores, np.ndarray) or scores.dtype.kind != "f" or len(scores) != len(vocabulary.tokens):
        found = f"{vocabulary.path} has no usable tokenizer.ggml.scores"
        raise TokenizerError(found, f"{len(vocabulary.tokens)} numbers", _FIX)
    prefix = vocabulary.flag("add_space_prefix", True)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.token_id("unknown_token_id")
    return _document(
        vocabulary,
        model=_bpe(
            vocabulary,
            merges_from_scores(vocabulary.tokens, vocabulary.types, scores.tolist()),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
        ),
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]}
        if prefix
        else space,
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        adds_bos=vocabulary.flag("add_bos_token", True),
    )


def merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[list[str]]:
    """Merges that build each normal piece from two others, by decreasing score, then by length as in transformers."""
    ids = {
        token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind in (_NORMAL, _USER_DEFINED)
    }
    ranked = []
    for piece, index in ids.items():
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        local = [(left, right) for left, right in halves if left in ids and right in ids]
        local.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        ranked += [(scores[index], len(left), len(right), left, right) for left, right in local]
    ranked.sort(key=lambda item: item[:3], reverse=True)
    return [[left, right] for _, _, _, left, right in ranked]


def _bpe(vocabulary: _Vocabulary, merges: list[list[str]], **options: Any) -> dict[str, Any]:
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(vocabulary.tokens)},
        "merges": merges,
    }
    return model | options


def _document(vocabulary: _Vocabulary, *, adds_bos: bool, **parts: Any) -> dict[str, Any]:
    """A complete tokenizer.json: the parts, the special tokens by type, and BOS as a post-processing template."""
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    post_processor = None
    if adds_bos:
        bos = vocabulary.token_id("bos_token_id")
        if bos is None:
            found = f"{vocabulary.path} asks for a begin-of-sequence token but has none"
            raise TokenizerError(found, "tokenizer.ggml.bos_token_id", _FIX)
        post_processor = _prepend(vocabulary.tokens[bos], bos)
    fixed = {"version": "1.0", "truncation": None, "padding": None}
    return fixed | parts | {"added_tokens": added, "post_processor": post_processor}


def _prepend(token: str, token_id: int) -> dict[str, Any]:
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, special, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }

"""How many bytes of a text one token can stand for: the bound by which prompts are refused before tokenizing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Normalizers that leave the bytes of a text or add some, and Unicode's forms, which at most quarter them.
_KEEPS = ("Prepend", "Lowercase", "ByteLevel")
_COMPOSES = ("NFC", "NFD", "NFKC", "NFKD")


def bytes_factor(tokenizer_json: Mapping[str, Any]) -> int | None:
    """Most bytes of a text for each byte of a token, by the rules of a parsed tokenizer.json; None without a bound.

    There is none if a token may swallow the blanks around it, if all unknown characters in a row become one token, or
    if a normalizer takes text away.
    """
    if any(token.get("lstrip") or token.get("rstrip") for token in tokenizer_json.get("added_tokens") or []):
        return None
    model = tokenizer_json.get("model") or {}
    if model.get("unk_token") is not None and model.get("fuse_unk") and not model.get("byte_fallback"):
        return None
    normalizer = tokenizer_json.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    factors = [_factor(step) for step in steps]
    return None if None in factors else max([1, *filter(None, factors)])


def _factor(step: Mapping[str, Any]) -> int | None:
    kind = step.get("type")
    if kind == "Replace":  # SentencePiece's " " by "\u2581"
        replaced = (step.get("pattern") or {}).get("String")
        return 1 if isinstance(replaced, str) and len(replaced) <= len(step.get("content", "")) else None
    return 4 if kind in _COMPOSES else 1 if kind in _KEEPS else None

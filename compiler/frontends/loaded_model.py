"""The value every loader returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flexspec.models.config import ModelConfig, WeightSource


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint that has been opened, not read: ``weights`` fetches one tensor at a time.

    ``tokenizer_json`` is a `tokenizers` file (None if the checkpoint has none). ``source_hash`` is the sha256 of the
    model's files. ``extra`` always has ``format``, ``architecture`` and ``special_tokens`` (texts by the names chat
    templates use: bos_token, eos_token ...); formats may add more.
    """

    config: ModelConfig
    weights: WeightSource
    tokenizer_json: bytes | None
    chat_template: str | None
    source_hash: str
    name: str
    extra: dict[str, Any] = field(default_factory=dict)

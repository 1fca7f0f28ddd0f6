"""The value every loader returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flexspec.models.config import ModelConfig, WeightSource

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class FusedState:
    """What an SSM that reads the LLM's hidden states has in addition to other models."""

    tap_layers: tuple[int, ...]  # layers of the LLM whose outputs it reads besides the last hidden state
    reduced_vocab_size: int  # outputs of its LM head
    keep_ids: NDArray[np.int32] | None = None  # reduced id -> the LLM's id; None: they are the same

    @property
    def build_options(self) -> Mapping[str, Any]:
        """What the family's builder takes besides the configuration."""
        return {"reduced_vocab_size": self.reduced_vocab_size}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint that is open but not loaded: ``weights`` reads one tensor at a time."""

    config: ModelConfig
    weights: WeightSource
    tokenizer_json: bytes | None  # a `tokenizers` file; None if the checkpoint has none
    chat_template: str | None
    source_hash: str  # sha256 of the model's files
    name: str
    format: str  # "gguf" or "huggingface"
    architecture: str  # as the checkpoint calls it
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # texts, by the names that chat templates use
    fused: FusedState | None = None  # of an SSM that reads the LLM's hidden states

    @property
    def build_options(self) -> Mapping[str, Any]:
        """What ``build_model`` takes besides the configuration."""
        return self.fused.build_options if self.fused else {}

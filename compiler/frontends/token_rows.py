"""Rows without a token: heads are often wider than their tokenizer, rounded up for the hardware of the training run.

Such a row has no text, so it must never be generated. It is cut when the model is compiled: programs, drafts, laws and
the check of prompts all see a vocabulary that ends with the last token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.frontends.loaded_model import LoadedModel
from flexspec.errors import TokenizerError
from flexspec.models.config import WeightSource

_ROWS_OF_TOKENS = ("embed_tokens.weight", "lm_head.weight", "lm_head.bias")


@cache
def token_ids(tokenizer_json: bytes) -> dict[str, int]:
    """Every token with its id, added ones too. Raises TokenizerError for a file that `tokenizers` cannot read."""
    from tokenizers import Tokenizer

    try:
        return dict(Tokenizer.from_buffer(tokenizer_json).get_vocab(with_added_tokens=True))
    except Exception as error:
        found = f"a tokenizer file that cannot be read ({str(error)[:200]})"
        raise TokenizerError(found, "a file that the tokenizers library reads", "download the file again") from None


def without_padding(model: LoadedModel) -> LoadedModel:
    """The model without the rows behind its last token. Raises TokenizerError for a damaged tokenizer."""
    if model.tokenizer_json is None:
        return model
    return first_rows(model, max(token_ids(model.tokenizer_json).values(), default=-1) + 1)


def first_rows(model: LoadedModel, count: int) -> LoadedModel:
    """The model with the first ``count`` rows of its vocabulary, if it has more."""
    rows = model.config.vocab_size
    if not 0 < count < rows:
        return model
    ids = model.config.bos_id
    config = replace(
        model.config,
        vocab_size=count,
        bos_id=None if ids is None or ids >= count else ids,
        eos_ids=tuple(token for token in model.config.eos_ids if token < count),
    )
    fused = model.fused
    if fused is not None and fused.keep_ids is not None:
        keep = fused.keep_ids[fused.keep_ids < count]
        fused = replace(fused, keep_ids=keep, reduced_vocab_size=len(keep))
    elif fused is not None:
        fused = replace(fused, reduced_vocab_size=min(fused.reduced_vocab_size, count))
    return replace(model, config=config, fused=fused, weights=_FirstRows(model.weights, rows, count))


@dataclass(frozen=True, slots=True)
class _FirstRows:
    """A checkpoint whose matrices of tokens end after ``count`` of ``rows``; one of another height stays as it is."""

    inner: WeightSource
    rows: int
    count: int

    def names(self) -> Iterable[str]:
        return self.inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.inner.shape(name)
        return (self.count, *shape[1:]) if self._is_cut(name, shape) else shape

    def get(self, name: str) -> NDArray[np.float32]:
        values = self.inner.get(name)
        return np.ascontiguousarray(values[: self.count]) if self._is_cut(name, values.shape) else values

    def _is_cut(self, name: str, shape: tuple[int, ...]) -> bool:
        return name in _ROWS_OF_TOKENS and shape[:1] == (self.rows,)

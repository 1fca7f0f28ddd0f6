"""From a row of logits to the target law: the distribution that accepted tokens must follow.

Owns the order of the transforms: temperature, top-k, top-p, min-p (Hugging Face's order). float32 rows are logits and
float64 rows are laws, everywhere in the runtime, so one can't pass for the other. V is the vocabulary size.

Edges, all defined: a greedy request's law is one-hot on the first argmax; ``top_k`` >= V is off; logits that tie with
the k-th are all kept (as in vLLM and Hugging Face, so the law does not depend on how tokens are numbered); the nucleus
is the smallest set of the likeliest tokens whose mass reaches ``top_p``, ties in order of id; ``min_p`` keeps tokens
with at least that share of the likeliest one's; -inf bans a token. NaN, +inf or a row of -inf raise EngineError.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import EngineError
from flexspec.sampling import SamplingParams

LogitsV = NDArray[np.float32]
LawV = NDArray[np.float64]  # a law over the vocabulary: float64 [V] that sums to 1
Mask = NDArray[np.bool_]


def target_law(logits_V: LogitsV, params: SamplingParams) -> LawV:
    """Law [V] of the next token after all transforms; sums to 1. Raises EngineError for invalid logits."""
    assert logits_V.dtype == np.float32 and logits_V.ndim == 1, "logits are float32 rows; float64 rows are laws"
    top = float(logits_V.max())  # NaN wins a max, so this one number shows all three faults
    if not np.isfinite(top):
        raise EngineError(
            f"logits whose maximum is {top}", "finite numbers, or -inf for banned tokens",
            "check the model's weights, then compile the artifact again",
        )  # fmt: skip
    law_V = np.zeros(logits_V.shape, np.float64)
    if params.greedy:
        law_V[int(logits_V.argmax())] = 1.0
        return law_V
    if 0 < params.top_k < len(logits_V):
        ids = np.flatnonzero(logits_V >= _kth_largest(logits_V, params.top_k))
        few = np.empty(len(ids), np.float64)
        _fill_filtered(few, logits_V[ids], top, params)
        law_V[ids] = few
    else:
        _fill_filtered(law_V, logits_V, top, params)
    return law_V


def _kth_largest(logits_V: LogitsV, k: int) -> np.float32:
    at = len(logits_V) - k
    kth: np.float32 = np.partition(logits_V, at)[at]
    return kth


def _fill_filtered(law_V: LawV, logits_V: LogitsV, top: float, params: SamplingParams) -> None:
    """Temperature, top-p and min-p over the tokens that top-k left."""
    np.subtract(logits_V, top, out=law_V, dtype=np.float64)
    law_V *= 1.0 / params.temperature
    np.exp(law_V, out=law_V)
    law_V *= 1.0 / law_V.sum()
    if params.top_p < 1.0:
        law_V *= _nucleus(law_V, params.top_p)
    if params.min_p > 0.0:
        law_V *= law_V >= params.min_p * law_V.max()
    if params.top_p < 1.0 or params.min_p > 0.0:
        law_V *= 1.0 / law_V.sum()


def _nucleus(law_V: LawV, top_p: float) -> Mask:
    """Mask of the smallest likeliest set with mass >= top_p.

    Tokens below (1 - top_p) / V have less than 1 - top_p together, so they are outside it: on a peaked law the sort
    sees tens of tokens instead of the vocabulary.
    """
    candidates = law_V[law_V >= (1.0 - top_p) / len(law_V)]
    candidates[::-1].sort()
    count = min(int(np.searchsorted(candidates.cumsum(), top_p)) + 1, len(candidates))
    last = candidates[count - 1]
    mask: Mask = law_V > last
    ties = np.flatnonzero(law_V == last)
    mask[ties[: count - np.count_nonzero(mask)]] = True
    return mask

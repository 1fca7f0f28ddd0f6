"""ngram: a back-off table counted over the LLM's own text (runtime/drafters/ngram.py).

Owns the table's format and its checks; compiler/artifact/ngram_table.py counts and writes one. Estimates are
interpolated Witten-Bell: ``P(y|ctx) = c(ctx, y) / (c(ctx) + types(ctx)) + backoff(ctx) * P(y|ctx without its oldest
token)`` with ``backoff = types / (c + types)``. Contexts are looked up by a 32-bit hash of their tokens: a collision
costs a bad draft, never a wrong output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexspec.drafters.record import DrafterRecord, DraftTable
from flexspec.errors import ArtifactError

FORMAT = 1
SUCCESSORS = 8  # next tokens stored per context
PROB_STEP = 0.05  # nats per unit of a stored probability: p = exp(-PROB_STEP * code)
MAX_ORDER = 8
HASH_MASK = (1 << 64) - 1
HASH_MULTIPLIER = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: Fibonacci hashing (Knuth, TAOCP 3, 6.4)
REBUILD = "run `flexspec tune` again to rebuild the table"
Arrays = Mapping[str, NDArray[Any]]

_KINDS = ("keys", "starts", "backoff", "tokens", "probs")


def check_table(arrays: Arrays, where: str) -> None:
    """Raise ArtifactError unless every lookup in the table stays inside its arrays."""
    meta = arrays.get("meta")
    if meta is None or meta.shape != (2,) or meta.dtype != np.int64:
        raise ArtifactError(f"{where}: no n-gram table", "a table written by flexspec tune", REBUILD)
    version, order = (int(value) for value in meta)
    if version != FORMAT or not 2 <= order <= MAX_ORDER:
        raise ArtifactError(
            f"{where}: n-gram table of format {version}, order {order}",
            f"format {FORMAT}, order 2 to {MAX_ORDER}", REBUILD,
        )  # fmt: skip
    for n in range(order):
        fault = _level_fault([arrays.get(f"{kind}.{n}") for kind in _KINDS])
        if fault:
            raise ArtifactError(f"{where}: level {n} of the n-gram table: {fault}", "a consistent table", REBUILD)


def check_vocabulary(arrays: Arrays, vocab_size: int, where: str) -> None:
    """Raise ArtifactError if a checked table could draft a token that an LLM of ``vocab_size`` tokens does not have."""
    most = max(int(arrays[f"tokens.{n}"].max(initial=0)) for n in range(int(arrays["meta"][1])))
    if most >= vocab_size:
        raise ArtifactError(
            f"{where}: token {most} in the n-gram table", f"tokens below the LLM's {vocab_size}",
            "use the table that was made for this LLM (flexspec tune makes one)",
        )  # fmt: skip


def _level_fault(level: Sequence[NDArray[Any] | None]) -> str | None:
    """What is wrong with one level's arrays (in the order of _KINDS), or None."""
    present = [array for array in level if array is not None and array.ndim == 1 and array.dtype.kind == "u"]
    if len(present) < len(level):
        return f"{', '.join(_KINDS)} are not all unsigned vectors"
    keys, starts, backoff, tokens, probs = present
    if len(starts) != len(keys) + 1 or len(backoff) != len(keys) or len(tokens) != len(probs):
        return "inconsistent lengths"
    if int(starts[0]) != 0 or int(starts[-1]) != len(tokens) or bool(np.any(starts[1:] < starts[:-1])):
        return "starts do not ascend from 0 to the number of tokens"
    if bool(np.any(keys[1:] <= keys[:-1])):
        return "keys do not ascend"
    return None


def extend_hash(state: int, token: int) -> int:
    """Hash of a context with one older token added; start from 0 with the newest. The key is its upper 32 bits."""
    mixed = ((state ^ (token + 1)) * HASH_MULTIPLIER) & HASH_MASK
    return mixed ^ (mixed >> 29)


def _check(arrays: Arrays, vocab_size: int, where: str) -> None:
    check_table(arrays, where)
    check_vocabulary(arrays, vocab_size, where)


DRAFTER = DrafterRecord("ngram", help="the artifact's table", order=1, table=DraftTable(check=_check, rebuild=REBUILD))

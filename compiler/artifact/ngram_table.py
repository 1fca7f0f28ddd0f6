"""A back-off n-gram table counted over token sequences: building, pruning, writing and reading its file.

flexspec/drafters/ngram.py defines the table, runtime/drafters/ngram.py reads from it. The same sequences give the same
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact.tensor_file import encode_tensors, map_tensors
from flexspec.drafters.ngram import (
    FORMAT,
    HASH_MULTIPLIER,
    MAX_ORDER,
    PROB_STEP,
    REBUILD,
    SUCCESSORS,
    check_table,
)
from flexspec.errors import TuneError

MIN_BYTES = 16_384
_HEADER_BYTES = 512  # in the file: once a level and once for the rest

Arrays = dict[str, NDArray[Any]]


@dataclass(slots=True)
class _LevelCounts:
    """Counts for contexts C of one length: one entry N per (context, next token), contexts ascending."""

    hash_C: NDArray[np.uint64]
    shorter_C: NDArray[np.int64]  # the context without its oldest token, in the level below
    context_N: NDArray[np.int64]
    token_N: NDArray[np.int64]
    count_N: NDArray[np.int64]
    below_N: NDArray[np.int64]  # the entry of the shorter context for the same next token


def build_table(
    sequences: Iterable[tuple[Sequence[int], Sequence[int]]], order: int = 4, max_bytes: int = 8_000_000
) -> Arrays:
    """Count answers (prompts only give context) and return the table's arrays, at most ``max_bytes`` once saved.

    ``order`` 4 means contexts of up to three tokens. Raises TuneError if there is nothing to count or ``order`` or
    ``max_bytes`` is out of range.
    """
    if not 2 <= order <= MAX_ORDER or max_bytes < MIN_BYTES:
        raise TuneError(
            f"n-gram order {order} in {max_bytes} bytes",
            f"an order from 2 to {MAX_ORDER} and at least {MIN_BYTES} bytes", "use order 4 and 8000000 bytes",
        )  # fmt: skip
    stream_N, target_M, reach_M = _flatten(sequences, order - 1)
    if not len(target_M):
        raise TuneError("no answer tokens", "at least one sequence with an answer", "generate the corpus first")
    levels = _count(stream_N, target_M, reach_M, order - 1)
    wide = int(stream_N.max()) > 0xFFFF
    gains = _gains(levels)
    return _pack(levels, _fit(levels, gains, max_bytes - _HEADER_BYTES * (order + 1), 5 if wide else 3), wide)


def save_table(arrays: Arrays, path: Path) -> None:
    """Write the arrays as a safetensors file; equal arrays give equal bytes."""
    path.write_bytes(b"".join(encode_tensors(arrays)))


def load_table(path: Path) -> Arrays:
    """Memory-map a table. Raises ArtifactError for a damaged file or another format."""
    arrays = map_tensors(path, fix=REBUILD)
    check_table(arrays, path.name)
    return arrays


def _flatten(
    sequences: Iterable[tuple[Sequence[int], Sequence[int]]], reach: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The token stream, the positions of answer tokens in it, and each one's context length (<= reach)."""
    stream: list[int] = []
    target: list[int] = []
    lengths: list[int] = []
    for prompt, answer in sequences:
        tail = list(prompt[-reach:])
        first = len(stream) + len(tail)
        stream += tail
        stream += answer
        target += range(first, len(stream))
        lengths += [min(reach, len(tail) + i) for i in range(len(answer))]
    return np.array(stream, np.int64), np.array(target, np.int64), np.array(lengths, np.int64)


def _count(
    stream_N: NDArray[np.int64], target_M: NDArray[np.int64], reach_M: NDArray[np.int64], longest: int
) -> list[_LevelCounts]:
    """Levels 0 .. longest. A context is named by (its shorter context, its oldest token), so names nest."""
    vocab = int(stream_N.max()) + 1
    rows_M = np.arange(len(target_M))
    next_M = stream_N[target_M]
    context_M = np.zeros(len(target_M), np.int64)
    entry_M = np.zeros(len(target_M), np.int64)
    hash_C = np.zeros(1, np.uint64)
    shorter_C = np.zeros(1, np.int64)
    levels: list[_LevelCounts] = []
    for n in range(longest + 1):
        if n:
            rows_M = rows_M[reach_M[rows_M] >= n]
            older = stream_N[target_M[rows_M] - n]
            pairs, inverse = np.unique(context_M[rows_M] * vocab + older, return_inverse=True)
            context_M[rows_M] = inverse
            shorter_C, oldest_C = pairs // vocab, pairs % vocab
            hash_C = _extend_hashes(hash_C[shorter_C], oldest_C)
        pairs, first, inverse, count = np.unique(
            context_M[rows_M] * vocab + next_M[rows_M], return_index=True, return_inverse=True, return_counts=True
        )
        below = entry_M[rows_M[first]]
        entry_M[rows_M] = inverse
        levels.append(_LevelCounts(hash_C, shorter_C, pairs // vocab, pairs % vocab, count, below))
    return levels


def _extend_hashes(state_C: NDArray[np.uint64], token_C: NDArray[np.int64]) -> NDArray[np.uint64]:
    """``extend_hash`` for arrays; uint64 products wrap, which is the mask."""
    mixed = (state_C ^ (token_C.astype(np.uint64) + np.uint64(1))) * np.uint64(HASH_MULTIPLIER)
    return mixed ^ (mixed >> np.uint64(29))


def _totals(level: _LevelCounts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per context: occurrences and distinct next tokens."""
    contexts = len(level.hash_C)
    total = np.bincount(level.context_N, weights=level.count_N, minlength=contexts).astype(np.int64)
    return total, np.bincount(level.context_N, minlength=contexts)


def _gains(levels: list[_LevelCounts]) -> list[NDArray[np.float64]]:
    """The gain of an entry: its count times the log of how much it raises the back-off's estimate (Stolcke 1998)."""
    gains: list[NDArray[np.float64]] = []
    below = np.zeros(0)
    for n, level in enumerate(levels):
        total, types = _totals(level)
        mass = (total + types)[level.context_N]
        observed = level.count_N / mass
        full: NDArray[np.float64]
        if n:
            lower = below[level.below_N]
            full = np.asarray(observed + types[level.context_N] / mass * lower, np.float64)
            gains.append(np.maximum(np.log(full / lower), 0.0) * level.count_N.astype(np.float64))
        else:
            full = np.asarray(level.count_N / total[0], np.float64)
            gains.append(np.full(len(full), np.inf))
        below = full
    return gains


def _ranks(level: _LevelCounts) -> NDArray[np.int64]:
    """Rank of each entry inside its context: most frequent first, then lowest token."""
    order = np.lexsort((level.token_N, -level.count_N, level.context_N))
    first = np.searchsorted(level.context_N, np.arange(len(level.hash_C)))
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order)) - first[level.context_N[order]]
    return ranks


def _fit(
    levels: list[_LevelCounts], gains: list[NDArray[np.float64]], max_bytes: int, entry_bytes: int
) -> list[NDArray[np.bool_]]:
    """Entries to keep: the best SUCCESSORS of each context, above the lowest gain that fits ``max_bytes``."""
    eligible = [_ranks(level) < SUCCESSORS for level in levels]

    def keep(threshold: float) -> list[NDArray[np.bool_]]:
        return [ok & (gain > threshold) for ok, gain in zip(eligible, gains, strict=True)]

    def size(masks: list[NDArray[np.bool_]]) -> int:
        entries = sum(int(k.sum()) for k in masks)
        contexts = sum(len(np.unique(level.context_N[k])) for level, k in zip(levels, masks, strict=True))
        return entries * entry_bytes + contexts * 9  # key 4, start 4, back-off 1

    for threshold in (-np.inf, 0.0):
        if size(keep(threshold)) <= max_bytes:
            return keep(threshold)
    low, high = 0.0, max(float(gain.max()) for gain in gains[1:])
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if size(keep(middle)) <= max_bytes else (middle, high)
    return keep(high)


def _pack(levels: list[_LevelCounts], masks: list[NDArray[np.bool_]], wide: bool) -> Arrays:
    """The flat arrays of each level, contexts ascending by key, successors by rank."""
    arrays: Arrays = {"meta": np.array([FORMAT, len(levels)], np.int64)}
    for n, (level, keep) in enumerate(zip(levels, masks, strict=True)):
        total, types = _totals(level)
        key_C = _without_clashes((level.hash_C >> np.uint64(32)).astype(np.int64), total)
        entries = np.flatnonzero(keep & (key_C[level.context_N] >= 0))
        entries = entries[np.lexsort((_ranks(level)[entries], key_C[level.context_N[entries]]))]
        context = level.context_N[entries]
        keys, starts = np.unique(key_C[context], return_index=True)
        mass = (total + types).astype(np.float64)
        if n == 0:
            mass = total.astype(np.float64)  # nothing below the unigrams, so no mass backs off
        arrays[f"keys.{n}"] = keys.astype(np.uint32)
        arrays[f"starts.{n}"] = np.append(starts, len(entries)).astype(np.uint32)
        arrays[f"backoff.{n}"] = _codes((types / mass)[context[starts]])
        arrays[f"tokens.{n}"] = level.token_N[entries].astype(np.uint32 if wide else np.uint16)
        arrays[f"probs.{n}"] = _codes(level.count_N[entries] / mass[context])
    return arrays


def _without_clashes(key_C: NDArray[np.int64], total_C: NDArray[np.int64]) -> NDArray[np.int64]:
    """The keys; -1 for a context whose key belongs to a more frequent (or else earlier) one."""
    order = np.lexsort((-total_C, key_C))
    repeated_C = np.zeros(len(key_C), np.bool_)
    repeated_C[order[1:]] = key_C[order[1:]] == key_C[order[:-1]]
    return np.where(repeated_C, -1, key_C)


def _codes(probability: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.clip(np.rint(-np.log(probability) / PROB_STEP), 0, 255).astype(np.uint8)

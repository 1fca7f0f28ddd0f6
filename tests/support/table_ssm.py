"""A table-driven SSM executor that refuses an inconsistent cache: logits are a function of the token path alone.

Each cache slot remembers the path it was computed for and which features fed it, so that a stale row, a wrong page, a
wrong position or a wrong ancestor bit is an assertion and not a slightly worse draft.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexspec.runtime.executors.step import StepBatch, StepResult
from flexspec.runtime.executors.top_successors import top_successors
from flexspec.types import PAGE_TOKENS

FEATURE_SIZE = 4
Path = tuple[int, ...]


def logits_after(path: Path, outputs: int) -> NDArray[np.float32]:
    """The SSM's logits behind a token path: fixed noise, different for every path."""
    digest = hashlib.blake2b(repr(path).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(0.0, 3.0, outputs).astype(np.float32)


def llm_feature(path: Path) -> NDArray[np.float32]:
    """The LLM's feature at the last token of ``path``."""
    return _feature(path, 1.0)


def ssm_feature(path: Path) -> NDArray[np.float32]:
    """What the SSM puts out at the last token of ``path``."""
    return _feature(path, 2.0)


def _feature(path: Path, kind: float) -> NDArray[np.float32]:
    digest = hashlib.blake2b(repr(path).encode(), digest_size=6).digest()
    return np.array([kind, *np.frombuffer(digest, np.uint16).astype(np.float32)], np.float32)


@dataclass(frozen=True)
class Row:
    """One cached row: its token path, and whether an LLM feature (or none needed) fed it."""

    path: Path
    committed: bool


class TableSsm:
    """Executor over ``outputs`` logits. ``fused``: rows must come with the right features.

    ``first`` is the sequence position of row 0 (a fused-state SSM never sees token 0, or a prefix whose features are
    gone); ``texts`` holds each request's true tokens, which rows counted as context must repeat.
    """

    def __init__(
        self, outputs: int, *, pages: int = 64, max_rows: int = 64, max_positions: int = 4096, fused: bool = False
    ):
        self.vocab_size = outputs
        self.pages = pages
        self.max_rows = max_rows
        self.max_positions = max_positions
        self.fused = fused
        self.cache: dict[int, tuple[Row, int]] = {}
        self.texts: list[list[int]] = []
        self.fed: list[int] = []  # rows of each step
        self.poison = False

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        rows = len(batch.ids_T)
        assert want_logits and want_features == self.fused and 0 < rows <= self.max_rows and len(batch.logit_rows_L)
        assert (batch.features_TE is not None) == self.fused
        self.fed.append(rows)
        used = [page for r, pages in enumerate(self._pages(batch)) for page in pages]
        assert len(used) == len(set(used)), "two requests hold one page"
        slots = batch.slots().tolist()
        paths: list[Path] = []
        for r in range(len(batch.contexts_R)):
            for t in range(int(batch.starts_R1[r]), int(batch.starts_R1[r + 1])):
                paths.append(self._read(batch, r, t, slots, paths))
                assert 0 <= batch.positions_T[t] < self.max_positions
        logits = np.stack([logits_after(paths[t], self.vocab_size) for t in batch.logit_rows_L])
        if self.poison:
            logits[:] = np.nan
        features = np.stack([ssm_feature(path) for path in paths]) if self.fused else None
        return StepResult(logits.argmax(1).astype(np.int32), logits, features)

    def _pages(self, batch: StepBatch) -> list[list[int]]:
        counts = batch.contexts_R + np.diff(batch.starts_R1)
        return [batch.page_table_RB[r, : -(-int(count) // PAGE_TOKENS)].tolist() for r, count in enumerate(counts)]

    def _read(self, batch: StepBatch, r: int, t: int, slots: list[int], paths: list[Path]) -> Path:
        """The path of row t: checks everything the row can see, then writes the row."""
        start, context = int(batch.starts_R1[r]), int(batch.contexts_R[r])
        seen = [self._slot(batch, r, i) for i in range(context)]
        base: Path = ()
        position = None
        for slot in seen:
            row, position = self.cache[slot]
            assert row.path[:-1] == base, f"stale row: {row.path} behind {base}"
            assert row.committed or not self._matching(row.path, position), "a drafted row passes for a committed one"
            base = row.path
        if batch.causal_R[r]:
            above = list(range(start, t))
        else:
            words = batch.ancestors_TW[t].tolist()
            bits = sum(word << (64 * i) for i, word in enumerate(words))
            assert bits >> (t - start) == 1, "a row sees itself and nothing later"
            above = [start + j for j in range(t - start) if bits >> j & 1]
        for j in above:
            assert paths[j][:-1] == base, "ancestor bits are not a path"
            base = paths[j]
            position = int(batch.positions_T[j])
        path = (*base, int(batch.ids_T[t]))
        here = int(batch.positions_T[t])
        assert position is None or here == position + 1, "positions step by one along a path"
        committed = self._check_feature(batch, t, path, here)
        self.cache[slots[t]] = (Row(path, committed), here)
        return path

    def _check_feature(self, batch: StepBatch, t: int, path: Path, position: int) -> bool:
        """True when row t belongs to the committed text. Its feature must be the LLM's, a draft's the SSM's own."""
        if not self.fused:
            return True
        assert batch.features_TE is not None
        feature = batch.features_TE[t]
        if np.array_equal(feature, ssm_feature(path[:-1])):
            return False
        texts = self._matching(path, position)
        assert any(np.array_equal(feature, llm_feature(tuple(text[:position]))) for text in texts), "wrong feature"
        return True

    def _matching(self, path: Path, position: int) -> list[list[int]]:
        """The true texts that hold ``path`` ending at ``position``."""
        return [text for text in self.texts if tuple(text[position - len(path) + 1 : position + 1]) == path]

    def _slot(self, batch: StepBatch, r: int, logical: int) -> int:
        return int(batch.page_table_RB[r, logical // PAGE_TOKENS]) * PAGE_TOKENS + logical % PAGE_TOKENS

    def top_successors(self, logits_LV: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return top_successors(logits_LV, k)

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        raise AssertionError("committed tokens are fed again; nothing is moved")

    def close(self) -> None:
        self.cache.clear()

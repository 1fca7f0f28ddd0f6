"""The artifact's self-test: one seeded step per model, its logits as a digest for each instruction set.

A loader that gets other bytes than the compiler did has a damaged library, another CPU behaviour or wrong weights; it
must say so before it answers anyone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import ArtifactError
from flexspec.kernels.cpu.launch import CpuLibrary

_ROWS = 8
_SEED = 20230516  # SpecInfer's first version, arXiv 2305.09781


def seeded_digest(library: Path, weights: Sequence[NDArray[np.generic]]) -> str:
    """sha256 of the float32 logits [8, outputs] of 8 seeded tokens as one chain at position 0.

    Raises ArtifactError when library and weights do not belong together, or the logits are not finite.
    """
    program = CpuLibrary(library, weights, threads=1, max_rows=_ROWS, pages=1, max_positions=_ROWS)
    try:
        return _logits_digest(program)
    finally:
        program.close()


def _logits_digest(program: CpuLibrary) -> str:
    facts = program.facts
    rng = np.random.default_rng(_SEED)
    ids = rng.integers(0, facts.id_rows, _ROWS).astype(np.int32)
    features = facts.reads_features
    states = rng.standard_normal((_ROWS, features)).astype(np.float32) if features else None
    rows = np.arange(_ROWS, dtype=np.int32)
    arrays: dict[str, NDArray[np.generic] | None] = {
        "ids": ids,
        "positions": rows,
        "starts": np.array([0, _ROWS], np.int32),
        "contexts": np.zeros(1, np.int32),
        "page_table": np.zeros((1, 1), np.int32),
        "logit_rows": rows,
        "causal": np.ones(1, np.uint8),
        "ancestors": np.zeros((_ROWS, 1), np.uint64),
        "features": states,
    }
    logits = np.full((_ROWS, facts.outputs), np.nan, np.float32)  # what a program leaves unwritten must show
    program.step(arrays, np.empty(_ROWS, np.int32), logits, None)
    if not np.isfinite(logits).all():
        raise ArtifactError(
            "the self-test step gives logits that are missing or not finite",
            "finite logits for every token",
            "check the weights; bf16 may overflow where f32 does not",
        )
    return hashlib.sha256(logits.tobytes()).hexdigest()

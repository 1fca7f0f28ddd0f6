"""The artifact's self-test: one seeded step of each program, with a digest of its results per instruction set.

A loader that computes other bytes than the compiler did has a damaged library, a CPU that behaves differently or wrong
weights; it must say so before it serves anyone. A rank's program is tested alone: what others would send is seeded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import ArtifactError
from flexspec.graph import Graph
from flexspec.kernels.cpu.exchange import first_rows, held_ids, split_logits
from flexspec.kernels.cpu.launch import CpuLibrary, Rows
from flexspec.kernels.cpu.places import width

_ROWS = 8
_SEED = 20230516  # SpecInfer's first version, arXiv 2305.09781


def seeded_digest(library: Path, weights: Sequence[NDArray[np.generic]], graph: Graph) -> str:
    """sha256 of the float32 logits [8, outputs] of 8 seeded tokens as one chain at position 0.

    For a rank's program: of the rows that it sends to others, in order, then of its share of the logits, if any.
    ``graph`` is the artifact's graph of the program. Raises ArtifactError when library and weights do not belong
    together, or a result is not finite.
    """
    program = CpuLibrary(library, weights, threads=1, max_rows=_ROWS, pages=1, max_positions=_ROWS)
    try:
        return _step_digest(program, split_logits(graph)[0])
    finally:
        program.close()


def _step_digest(program: CpuLibrary, graph: Graph) -> str:
    facts = program.facts
    rng = np.random.default_rng(_SEED)
    first, ids = held_ids(graph)
    features = facts.reads_features
    rows = np.arange(_ROWS, dtype=np.int32)
    arrays: dict[str, NDArray[np.generic] | None] = {
        "ids": rng.integers(first, first + ids, _ROWS).astype(np.int32),
        "positions": rows,
        "starts": np.array([0, _ROWS], np.int32),
        "contexts": np.zeros(1, np.int32),
        "page_table": np.zeros((1, 1), np.int32),
        "logit_rows": rows,
        "causal": np.ones(1, np.uint8),
        "ancestors": np.zeros((_ROWS, 1), np.uint64),
        "features": rng.standard_normal((_ROWS, features)).astype(np.float32) if features else None,
    }
    digest, finite = hashlib.sha256(), True

    def note(values: Rows) -> None:
        nonlocal finite
        finite = finite and bool(np.isfinite(values).all())
        digest.update(np.ascontiguousarray(values).data)

    def on_exchange(index: int, source: Rows | None, target: Rows | None) -> None:
        node = graph.nodes[index]
        if source is not None:
            note(source[:, : width(graph, node.inputs[0])])
        if target is not None:
            columns = width(graph, node.outputs[0].name)
            target[:, :columns] = rng.standard_normal((len(target), columns))

    # What a program leaves unwritten must show.
    logits = np.full((_ROWS, facts.outputs), np.nan, np.float32) if facts.outputs else None
    program.step(arrays, np.empty(_ROWS, np.int32), logits, None, on_exchange, first_rows(graph))
    if logits is not None:
        note(logits)
    if not finite:
        raise ArtifactError(
            "the self-test step gives logits that are missing or not finite",
            "finite logits for every token",
            "check the weights; bf16 may overflow where f32 does not",
        )
    return digest.hexdigest()

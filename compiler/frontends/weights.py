"""What all checkpoint formats share: float32 widening, finite checks, and the one-to-one check of names and shapes.

A checkpoint is a ``WeightSource`` (flexspec/models/config.py): one tensor at a time, never the whole model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import WeightError
from flexspec.models.config import WeightSource

_MAX_NAMES_SHOWN = 8


def finite(array: NDArray[np.float32], name: str, path: Path) -> NDArray[np.float32]:
    """``array`` itself; raises WeightError for a NaN or an infinity, the marks of a damaged or overflowed file."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, 1 << 22):  # in pieces: a mask of a whole embedding would waste memory
        bad = ~np.isfinite(flat[start : start + (1 << 22)])
        if bad.any():
            index = start + int(np.argmax(bad))
            found = f"tensor {name!r} of {path} has {flat[index]} at element {index}"
            raise WeightError(found, "finite numbers", "the file is damaged: download it again")
    return array


def check_layer_count(source: WeightSource, layers: int, path: Path) -> None:
    """Check the configuration's layer count against the checkpoint, before a graph of that size is built.

    The first number in a name is its layer (``layers.7.mlp.up_proj.weight``), whatever precedes it.
    """
    numbers: dict[tuple[str, ...], set[str]] = {}
    for name in source.names():
        parts = tuple(name.split("."))
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is not None:
            numbers.setdefault(parts[:at], set()).add(parts[at])
    counts = {len(stored) for stored in numbers.values()}
    if layers not in counts:
        found = f"{path} is configured with {layers} layers but holds weights of {max(counts, default=0)}"
        raise WeightError(
            found, "the weights of every layer", "the files are incomplete or of two models: download them again"
        )


def check_weights(source: WeightSource, expected: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Check that ``source`` has each expected parameter exactly once, in its shape, and no others.

    Rotary ``inv_freq`` buffers are ignored, and so is the ``lm_head.weight`` of a tied model if it equals the
    embedding. Raises WeightError with the names of all missing, unused and misshapen tensors.
    """
    names = list(source.names())
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise WeightError(f"{path} holds {_list(twice)} twice", "each parameter once", "remove the duplicates")
    present = set(names)
    missing = sorted(set(expected) - present, key=_natural)
    extra = sorted((name for name in present - set(expected) if not _is_harmless(name)), key=_natural)
    if "lm_head.weight" in extra and "embed_tokens.weight" in expected:
        _check_tied(source, path)
        extra.remove("lm_head.weight")
    misshapen = [
        f"{name} {list(source.shape(name))} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in present and source.shape(name) != tuple(shape)
    ]
    problems = []
    if missing:
        problems.append(f"lacks {_list(missing)}")
    if extra:
        problems.append(f"has {_list(extra)} that the model does not use")
    if misshapen:
        problems.append(f"has wrong shapes: {_list(misshapen)}")
    if problems:
        fix = "the weights and the configuration do not belong together: download both again"
        raise WeightError(f"{path} {'; '.join(problems)}", f"exactly {len(expected)} parameters of the model", fix)


def _is_harmless(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")


def _check_tied(source: WeightSource, path: Path) -> None:
    """A tied model's duplicate head must equal the embedding, or the configuration is wrong."""
    digests = []
    for name in ("embed_tokens.weight", "lm_head.weight"):
        digests.append((source.shape(name), hashlib.sha256(source.get(name).data).digest()))
    if digests[0] != digests[1]:
        found = f"{path} has an lm_head.weight unlike its embedding, but the configuration ties the two"
        raise WeightError(found, "equal tensors, or tie_word_embeddings false", "correct tie_word_embeddings")


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    rest = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key that puts layers.2 before layers.10."""
    parts = name.split(".")
    return [(0, int(part)) if part.isascii() and part.isdigit() and len(part) < 10 else (1, part) for part in parts]

"""Arguments of several functions of the Python face: one or more paths, dtypes and weight formats by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flexspec.errors import CompileError
from flexspec.types import DType, WeightFormat
from flexspec.weight_formats.registry import weight_formats

AnyPath = str | os.PathLike[str]
AnyPaths = AnyPath | Sequence[AnyPath]
_DTYPES = (DType.BF16, DType.F32)  # of activations and KV cache


def listed(paths: AnyPaths) -> list[Path]:
    """One or more paths as a list."""
    return [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(path) for path in paths]


def read_dtype(dtype: str | DType) -> DType:
    """A dtype by its name. Raises CompileError for one that models are not compiled for."""
    match = next((known for known in _DTYPES if dtype in (known, known.value)), None)
    if match is None:
        raise CompileError(f"dtype {dtype}", f"one of {', '.join(known.value for known in _DTYPES)}", "choose one")
    return match


def read_weights(weights: str | None) -> WeightFormat | None:
    """A weight format by its name; None means that of the dtype. Raises CompileError for an unknown one."""
    if weights is not None and weights not in weight_formats():
        raise CompileError(f"weights {weights}", f"one of {', '.join(weight_formats())}", "choose one")
    return None if weights is None else weight_formats()[weights]

"""Formats in which weight matrices are stored: f32, bf16, and every other file of this folder, found by its presence.

docs/design/weight-formats.md says what a format is, and what takes it. Registers none itself.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from flexspec.errors import WeightError
from flexspec.types import DType, TensorType, WeightFormat

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@cache
def weight_formats() -> Mapping[str, WeightFormat]:
    """Every format by name: the ``FORMAT`` of each other file here."""
    import flexspec.weight_formats as package

    files = [module.name for module in pkgutil.iter_modules(package.__path__) if module.name != "registry"]
    formats = [importlib.import_module(f"{package.__name__}.{file}").FORMAT for file in files]
    table = {each.name: each for each in sorted(formats, key=lambda each: each.name)}
    assert len(table) == len(formats), f"a weight format is declared twice: {[each.name for each in formats]}"
    return table


def format_of(kind: TensorType) -> WeightFormat:
    """The format in which a weight of this type is stored."""
    return kind.format or plain_format(kind.dtype)


def plain_format(dtype: DType) -> WeightFormat:
    """The format that stores values of ``dtype`` as they are."""
    return weight_formats()[dtype.value]


def encode_weight(name: str, stored: WeightFormat, values: NDArray[np.float32]) -> NDArray[np.generic]:
    """The rows of weight ``name`` as a format stores them. Raises WeightError for a value that it cannot hold."""
    try:
        return stored.encode(values)
    except OverflowError as error:
        raise WeightError(
            f"weight {name} has {error}, out of range for {stored.name} ({stored.doc})",
            "weights that the format can hold",
            "choose another format (--weights)",
        ) from None


def stored_values(name: str, kind: TensorType, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """What is left of float32 values once they are stored as the type says. Operators see these, in its dtype.

    Raises WeightError for a value that the format cannot hold.
    """
    return values if kind.format is None else kind.format.decode(encode_weight(name, kind.format, values))

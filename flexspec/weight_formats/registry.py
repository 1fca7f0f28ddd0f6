"""Formats in which weight matrices are stored: f32, bf16, and every other file of this folder, found by its presence.

docs/design/weight-formats.md says what a format is and who uses it. Registers none itself.
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


_ALWAYS_FITS = 60_000.0  # magnitudes that every format holds: most weights need no second look


def format_names() -> tuple[str, ...]:
    """Names of all formats, which are those of the other files in this folder; imports none of them."""
    import flexspec.weight_formats as package

    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.name != "registry"))


@cache
def weight_formats() -> Mapping[str, WeightFormat]:
    """Every format by name: the ``FORMAT`` of each other file in this folder."""
    table = {name: importlib.import_module(f"flexspec.weight_formats.{name}").FORMAT for name in format_names()}
    assert all(name == stored.name for name, stored in table.items()), "a file has the name of its format"
    return table


def format_of(kind: TensorType) -> WeightFormat:
    """The format in which a weight of this type is stored."""
    return kind.format or plain_format(kind.dtype)


def plain_format(dtype: DType) -> WeightFormat:
    """The format that stores values of ``dtype`` unchanged."""
    return weight_formats()[dtype.value]


def encode_weight(name: str, stored: WeightFormat, values: NDArray[np.float32]) -> NDArray[np.generic]:
    """The rows of weight ``name`` as a format stores them. Raises WeightError for a value that it cannot hold.

    The check is of what is stored: a number that is finite in float32 may round to infinity, and one such row would end
    every request that meets its token.
    """
    import numpy as np

    try:
        encoded = stored.encode(values)
    except OverflowError as error:
        raise _out_of_range(name, stored, str(error)) from None
    if stored.dtype is not DType.F32 and values.size and float(np.abs(values).max()) > _ALWAYS_FITS:
        beyond = ~np.isfinite(stored.decode(encoded)).reshape(values.shape)
        if beyond.any():
            first = tuple(int(at[0]) for at in np.nonzero(beyond))
            raise _out_of_range(name, stored, f"{values[first]} at {list(first)}")
    return encoded


def _out_of_range(name: str, stored: WeightFormat, what: str) -> WeightError:
    return WeightError(
        f"weight {name} has {what}, out of range for {stored.name} ({stored.doc})",
        "weights that the format can hold",
        "choose another format (--weights, or --dtype f32)",
    )


def stored_values(name: str, kind: TensorType, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 values as they come back after storing them as the type says. Operators see these, in its dtype.

    Raises WeightError for a value that the format cannot hold.
    """
    return values if kind.format is None else kind.format.decode(encode_weight(name, kind.format, values))

"""Weights that files store under other names than ours, and experts stored one by one: ours are stacked, [X, ...].

Each family lists the stored names (Checkpoint.stored_names in flexspec/models/config.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import WeightError
from flexspec.models.config import WeightSource

_LAYER = re.compile(r"(layers\.\d+\.)(.+)")
_MAX_SHOWN = 8
_FIX = "the file is damaged or belongs to another model: download it again"


class RenamedWeights:
    """A WeightSource over another. ``stored``: our name -> the stored name, or for a stack the names of all experts."""

    def __init__(self, source: WeightSource, stored: Mapping[str, str | tuple[str, ...]]) -> None:
        self._source, self._stored = source, stored

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored.get(name, name)
        if isinstance(stored, str):
            return self._source.shape(stored)
        return (len(stored), *self._source.shape(stored[0]))

    def get(self, name: str) -> NDArray[np.float32]:
        """A tensor in float32; a stack is read expert by expert. Raises WeightError if experts differ in shape."""
        stored = self._stored.get(name, name)
        if isinstance(stored, str):
            return self._source.get(stored)
        stack_XFE = np.empty(self.shape(name), np.float32)
        for expert, part in enumerate(stored):
            array = self._source.get(part)
            if array.shape != stack_XFE.shape[1:]:
                raise WeightError(
                    f"{part} of shape {list(array.shape)}", f"{list(stack_XFE.shape[1:])}, as {stored[0]}", _FIX
                )
            stack_XFE[expert] = array
        return stack_XFE


def rename_weights(
    source: WeightSource, stored_names: Sequence[tuple[str, str]], experts: int, path: Path
) -> RenamedWeights:
    """``source`` under our names. Raises WeightError for missing or surplus experts and for duplicate weights."""
    patterns = [(re.compile(re.escape(stored).replace(r"\{x\}", r"(\d{1,6})")), ours) for stored, ours in stored_names]
    single: dict[str, str] = {}
    stacks: dict[str, dict[int, str]] = {}
    for name in source.names():
        ours, expert = _ours(name, patterns)
        if ours in single or (expert is None and ours in stacks) or expert in stacks.get(ours, {}):
            raise WeightError(f"{path} holds {ours!r} twice, also as {name!r}", "each parameter once", _FIX)
        if expert is None:
            single[ours] = name
        else:
            stacks.setdefault(ours, {})[expert] = name
    for ours, parts in stacks.items():
        missing = list(islice((x for x in range(experts) if x not in parts), _MAX_SHOWN))
        surplus = sorted(x for x in parts if x >= experts)[:_MAX_SHOWN]
        if missing or surplus:
            found = f"{path} lacks experts {missing}" if missing else f"{path} has experts {surplus}"
            raise WeightError(f"{found} of {ours}", f"{experts} experts, numbered from 0", _FIX)
    return RenamedWeights(source, {**single, **{k: tuple(v[x] for x in range(experts)) for k, v in stacks.items()}})


def _ours(name: str, patterns: Sequence[tuple[re.Pattern[str], str]]) -> tuple[str, int | None]:
    """Our name for a stored tensor, and the number of its expert, if any."""
    layer = _LAYER.fullmatch(name)
    prefix, rest = (layer[1], layer[2]) if layer else ("", name)
    for pattern, ours in patterns:
        if match := pattern.fullmatch(rest):
            return prefix + ours, int(match[1]) if match.groups() else None
    return name, None

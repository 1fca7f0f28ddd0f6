"""Weights that files call otherwise than we do, and experts that they store one by one: ours are stacked, [X, ...].

Which names those are is the family's affair (Checkpoint.stored_names in flexspec/models/config.py).
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
_MOST_SHOWN = 8
_FIX = "the file is damaged or of another model: download it again"


class RenamedWeights:
    """WeightSource over another: ``stored`` has the stored name of ours, or for a stack, those of all experts."""

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
        """A tensor in float32; a stack is read expert by expert. Raises WeightError when experts differ in shape."""
        stored = self._stored.get(name, name)
        if isinstance(stored, str):
            return self._source.get(stored)
        whole = np.empty(self.shape(name), np.float32)
        for expert, part in enumerate(stored):
            array = self._source.get(part)
            if array.shape != whole.shape[1:]:
                raise WeightError(
                    f"{part} of shape {list(array.shape)}", f"{list(whole.shape[1:])}, as {stored[0]}", _FIX
                )
            whole[expert] = array
        return whole


def rename_weights(
    source: WeightSource, stored_names: Sequence[tuple[str, str]], experts: int, path: Path
) -> RenamedWeights:
    """``source`` under our names. Raises WeightError for a missing or surplus expert, and for one weight twice."""
    patterns = [(re.compile(re.escape(theirs).replace(r"\{x\}", r"(\d{1,6})")), ours) for theirs, ours in stored_names]
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
        missing = list(islice((x for x in range(experts) if x not in parts), _MOST_SHOWN))
        surplus = sorted(x for x in parts if x >= experts)[:_MOST_SHOWN]
        if missing or surplus:
            found = f"{path} lacks experts {missing}" if missing else f"{path} has experts {surplus}"
            raise WeightError(f"{found} of {ours}", f"{experts} experts, from 0 on", _FIX)
    return RenamedWeights(source, {**single, **{k: tuple(v[x] for x in range(experts)) for k, v in stacks.items()}})


def _ours(name: str, patterns: Sequence[tuple[re.Pattern[str], str]]) -> tuple[str, int | None]:
    """Our name of a stored tensor, and which expert it is of."""
    layer = _LAYER.fullmatch(name)
    prefix, rest = (layer[1], layer[2]) if layer else ("", name)
    for pattern, ours in patterns:
        if found := pattern.fullmatch(rest):
            return prefix + ours, int(found[1]) if found.groups() else None
    return name, None

"""Weights of an artifact, each stored once: an SSM may read the LLM's own embedding or head.

Owns that rule, for CPU and GPU alike: a tensor with the bytes of an earlier one is a reference to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact.write import ArtifactWriter

Place = tuple[str, str]  # file, tensor


class WeightStore:
    """Writes weight files into an artifact."""

    def __init__(self, writer: ArtifactWriter) -> None:
        self._writer = writer
        self._stored: dict[str, Place] = {}  # by content

    def add(
        self, file: str, tensors: Mapping[str, NDArray[np.generic]], *, bf16: Collection[str] = ()
    ) -> dict[str, Place]:
        """Store in ``file`` what is not stored yet; returns the place of each tensor.

        ``bf16`` names uint16 arrays of bfloat16 bits.
        """
        places: dict[str, Place] = {}
        fresh: dict[str, NDArray[np.generic]] = {}
        for name, array in tensors.items():
            key = f"{'bf16' if name in bf16 else array.dtype.str} {list(array.shape)} {_sha256(array)}"
            if key not in self._stored:
                self._stored[key] = (file, name)
                fresh[name] = array
            places[name] = self._stored[key]
        if fresh:
            self._writer.add_tensors(file, fresh, bf16=[name for name in bf16 if name in fresh])
        return places


def _sha256(array: NDArray[np.generic]) -> str:
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()

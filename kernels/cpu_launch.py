"""Loads a built CPU program and calls it: the one place that mirrors the C ABI of templates/cpu/context.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import CapacityError, CompileError, EngineError

ABI = 1
_POINTERS = ("ids", "positions", "starts", "contexts", "page_table", "logit_rows")


class _Step(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int32) for name in "TRBWL"],
        *[(name, ctypes.c_void_p) for name in _POINTERS],
        ("causal", ctypes.c_void_p),
        ("ancestors", ctypes.c_void_p),
        ("features", ctypes.c_void_p),
        ("argmax", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("features_out", ctypes.c_void_p),
    ]


def _address(array: NDArray[np.generic] | None) -> int | None:
    return None if array is None else array.ctypes.data


class CpuLibrary:
    """One model's program with its context (weights, arena, KV pool, threads). Not thread-safe."""

    def __init__(
        self,
        library: Path,
        weights: Sequence[NDArray[np.generic]],
        *,
        threads: int,
        max_rows: int,
        pages: int,
        max_positions: int,
    ) -> None:
        """Raises CompileError for a library of another ABI, CapacityError when the memory cannot be had."""
        self._lib = ctypes.CDLL(str(library))
        if self._lib.fs_abi() != ABI:
            raise CompileError(f"{library} has ABI {self._lib.fs_abi()}", f"ABI {ABI}", "compile the model again")
        self._lib.fs_create.restype = ctypes.c_void_p
        self._weights = list(weights)  # kept alive: the program reads them in place
        table = (ctypes.c_void_p * len(weights))(*[w.ctypes.data for w in weights])
        self._table = table
        self._ctx = self._lib.fs_create(table, threads, max_rows, pages, max_positions)
        if not self._ctx:
            raise CapacityError(
                f"no memory for {pages} KV pages and {max_rows} rows (or AMX is not permitted here)",
                "an address space that holds them",
                "lower --kv-tokens, or set FLEXSPEC_CPU_ISA=avx512",
            )

    def step(
        self,
        arrays: dict[str, NDArray[np.generic] | None],
        argmax_L: NDArray[np.int32],
        logits_LV: NDArray[np.float32] | None,
        features_out: NDArray[np.float32] | None,
    ) -> None:
        """Run one step over C-contiguous arrays named as in runtime/step.py. Raises EngineError when it is refused."""
        ids, table, words = arrays["ids"], arrays["page_table"], arrays["ancestors"]
        assert ids is not None and table is not None and words is not None
        block = _Step(len(ids), table.shape[0], table.shape[1], words.shape[1], len(argmax_L))
        for name, array in arrays.items():
            setattr(block, name, _address(array))
        block.argmax, block.logits = _address(argmax_L), _address(logits_LV)
        block.features_out = _address(features_out)
        if self._lib.fs_step(ctypes.c_void_p(self._ctx), ctypes.byref(block)):
            raise EngineError(
                f"a step of {len(ids)} rows", "no more rows than max_rows", "lower the batch or tree size"
            )

    def move_kv(self, src_slots: NDArray[np.int32], dst_slots: NDArray[np.int32]) -> None:
        self._lib.fs_move_kv(
            ctypes.c_void_p(self._ctx),
            ctypes.c_int(len(src_slots)),
            ctypes.c_void_p(src_slots.ctypes.data),
            ctypes.c_void_p(dst_slots.ctypes.data),
        )

    def close(self) -> None:
        if self._ctx:
            self._lib.fs_destroy(ctypes.c_void_p(self._ctx))
            self._ctx = None

"""Loads a built CPU program and calls it: the one place that mirrors the C ABI of templates/cpu/context.h."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import ArtifactError, CapacityError, EngineError
from flexspec.kernels.cpu.build import ABI
from flexspec.kernels.cpu.facts import ProgramFacts, read_facts

_FIX = "compile the model again with this version"
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


# Called at each exchange with other ranks: (node, rows, in, in_ld, out, out_ld), see kernels/cpu/exchange.py.
_ON_EXCHANGE = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int
)
Rows = NDArray[np.float32]
OnExchange = Callable[[int, Rows | None, Rows | None], None]  # (node, rows [n, ld] to send, rows [n, ld] to fill)


def _rows(address: int | None, rows: int, stride: int) -> Rows | None:
    """Rows of a program's arena, in place."""
    if not address:
        return None
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (rows, stride))


def _address(array: NDArray[np.generic] | None) -> int | None:
    return None if array is None else array.ctypes.data


_memory_files: dict[tuple[str, str], str] = {}  # path and sha256 of a program -> the name under which it is loaded


def _open_library(path: Path) -> ctypes.CDLL:
    """Load the program's bytes as they are now.

    The dynamic loader knows a library by its path and file: one that was compiled again would be the old program, and
    one written or cut in place would change under the steps. A copy in memory has neither fault, and file systems that
    forbid programs (noexec) do not matter. Its descriptor stays open, so that its name is never another's.
    """
    data = path.read_bytes()
    key = (str(path), hashlib.sha256(data).hexdigest())
    if key not in _memory_files and hasattr(os, "memfd_create"):
        with suppress(OSError):  # forbidden here (vm.memfd_noexec, a sandbox): the file itself will do
            handle = os.memfd_create(path.name)
            try:
                with open(handle, "wb", closefd=False) as file:
                    file.write(data)
                ctypes.CDLL(f"/proc/self/fd/{handle}")
            except OSError:
                os.close(handle)
                raise
            _memory_files[key] = f"/proc/self/fd/{handle}"
    return ctypes.CDLL(_memory_files.get(key, str(path)))


def _load(path: Path) -> tuple[ctypes.CDLL, ProgramFacts]:
    try:
        library = _open_library(path)
        if library.fs_abi() != ABI:
            raise ArtifactError(f"{path.name} has ABI {library.fs_abi()}", f"ABI {ABI}", _FIX)
        library.fs_create.restype = ctypes.c_void_p
        return library, read_facts(library)
    except (OSError, AttributeError, ValueError) as error:  # no library, no such function, no such constant
        raise ArtifactError(f"{path.name} is not a program of this version ({error})", f"ABI {ABI}", _FIX) from None


def _check_weights(path: Path, facts: ProgramFacts, weights: Sequence[NDArray[np.generic]]) -> None:
    if not all(weight.flags.c_contiguous for weight in weights):
        raise ArtifactError(f"weights of {path.name} with gaps", "contiguous arrays", _FIX)
    sizes = [weight.nbytes for weight in weights]
    if len(sizes) != len(facts.weight_bytes):
        raise ArtifactError(f"{len(sizes)} weights for {path.name}", f"{len(facts.weight_bytes)}", _FIX)
    for i, (have, wanted) in enumerate(zip(sizes, facts.weight_bytes, strict=True)):
        if have != wanted:
            raise ArtifactError(f"weight {i} of {path.name} has {have} bytes", f"{wanted} bytes", _FIX)


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
        """Raises ArtifactError for a foreign library or another program's weights, CapacityError when memory cannot be
        allocated."""
        self._ctx: int | None = None
        self._lib, self.facts = _load(library)
        _check_weights(library, self.facts, weights)
        self._meets = hasattr(self._lib, "fs_on_exchange")  # looked up once: the search for a missing symbol is slow
        self._stamps: NDArray[np.int64] | None = None
        self._weights = list(weights)  # kept alive: the program reads them in place
        self._table = table = (ctypes.c_void_p * len(weights))(*[w.ctypes.data for w in weights])
        positions = min(max_positions, self.facts.max_positions)  # scratch is sized by them
        self._ctx = self._lib.fs_create(table, threads, max_rows, pages, positions)
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
        on_exchange: OnExchange | None = None,
        first_rows: Sequence[int] = (),
    ) -> None:
        """Run one step over C-contiguous arrays named as in runtime/executors/step.py. Raises EngineError when refused.

        ``on_exchange`` is called at each exchange between ranks, on this thread; its rows are valid during the call
        only, and what it raises is raised here. ``first_rows``: where the rank's part of each shared table begins.
        """
        ids, table, words = arrays["ids"], arrays["page_table"], arrays["ancestors"]
        assert ids is not None and table is not None and words is not None
        block = _Step(len(ids), table.shape[0], table.shape[1], words.shape[1], len(argmax_L))
        for name, array in arrays.items():
            setattr(block, name, _address(array))
        block.argmax, block.logits = _address(argmax_L), _address(logits_LV)
        block.features_out = _address(features_out)
        failed: list[BaseException] = []
        keep_alive = self._listen(on_exchange, first_rows, failed) if self._meets else None
        refused = self._lib.fs_step(ctypes.c_void_p(self._ctx), ctypes.byref(block))
        del keep_alive
        if failed:
            raise failed[0]
        if refused:
            raise EngineError(
                f"a step of {len(ids)} rows", "no more rows than max_rows", "lower the batch or tree size"
            )

    def _listen(self, on_exchange: OnExchange | None, first_rows: Sequence[int], failed: list[BaseException]) -> object:
        """Register the callback for exchanges; after a failure it does nothing, so that the step can finish."""
        if on_exchange is None:
            raise EngineError("one rank's program alone", "all ranks of its plan", "run it by its plan")
        call = on_exchange

        def listen(node: int, rows: int, source: int | None, stride: int, target: int | None, out_stride: int) -> None:
            if not failed:
                try:
                    call(node, _rows(source, rows, stride), _rows(target, rows, out_stride))
                except BaseException as error:  # an exception must not cross C code
                    failed.append(error)

        listener = _ON_EXCHANGE(listen)
        firsts = (ctypes.c_int * len(first_rows))(*first_rows)
        self._lib.fs_on_exchange(listener, firsts)
        return listener, firsts

    def top_successors(self, logits_LV: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Indices and softmax probabilities [L, k] as templates/cpu/top.h computes them; ``k`` at most the columns."""
        rows, columns = logits_LV.shape
        assert logits_LV.flags.c_contiguous and logits_LV.dtype == np.float32 and 0 < k <= columns
        index, chance = np.empty((rows, k), np.int32), np.empty((rows, k), np.float32)
        self._lib.fs_top_successors(
            ctypes.c_int(rows), ctypes.c_int(columns), ctypes.c_void_p(logits_LV.ctypes.data), ctypes.c_int(k),
            ctypes.c_void_p(index.ctypes.data), ctypes.c_void_p(chance.ctypes.data),
        )  # fmt: skip
        return index, chance

    def keep_stamps(self, nodes: int) -> NDArray[np.int64]:
        """From now on each step fills these [1 + nodes] numbers: its start, then the end of each node of the graph.

        Nanoseconds of a steady clock; 0 for a node without code. Raises ArtifactError for a program that has no clock.
        """
        if not hasattr(self._lib, "fs_profile"):
            raise ArtifactError("a program without a clock", "one of this version", _FIX)
        self._stamps = np.zeros(1 + nodes, np.int64)  # kept alive: the program writes it
        self._lib.fs_profile(ctypes.c_void_p(self._ctx), ctypes.c_void_p(self._stamps.ctypes.data))
        return self._stamps

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

"""The emitters, which turn a node into template calls, by the kernel key of its record: every other file here.

A file is found by its presence. It sets ``EMITTERS``, kernel key -> function; and ``HEADER``, if entry.h does not
include their templates: a file of templates/cpu, included by programs that use one of these keys.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from flexspec.kernels.cpu.emitter import Emit


@dataclass(frozen=True, slots=True)
class KernelEmitter:
    """One kernel key."""

    emit: Emit
    header: str | None  # that a program includes for it, besides entry.h


@cache
def kernel_emitters() -> Mapping[str, KernelEmitter]:
    """Every kernel key of the CPU backend."""
    import flexspec.kernels.cpu.emitters as package

    table: dict[str, KernelEmitter] = {}
    for file in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        if file == "registry":
            continue
        module = importlib.import_module(f"{package.__name__}.{file}")
        for key, emit in module.EMITTERS.items():
            assert key not in table, f"kernel key {key} has two emitters"
            table[key] = KernelEmitter(emit, getattr(module, "HEADER", None))
    return dict(sorted(table.items()))

"""The drafter record: what draft plans, help, compile and the loader know of a drafter, in one place.

A drafter is one file in this folder that sets ``DRAFTER`` to a record, and one of the same name in runtime/drafters/
with its code, a function ``make``. They are found by presence. This half is in the core because the grammar of draft
plans and the compiler read it, and neither may import the runtime.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from numpy.typing import NDArray

MAX_SSMS = 8  # of an artifact

TableCheck = Callable[[Mapping[str, NDArray[Any]], int, str], None]  # (arrays, vocabulary size of the LLM, where)


@dataclass(frozen=True, slots=True)
class DraftOption:
    """A number in draft plans that shapes what one drafter proposes: ``/name=N``."""

    name: str
    default: int
    highest: int  # the lowest value is 1
    help: str


@dataclass(frozen=True, slots=True)
class DraftTable:
    """Arrays that the drafter reads: ``NAME.safetensors`` of an SSM's folder, which compile puts into the artifact."""

    check: TableCheck  # raises ArtifactError for a damaged table, or one that could draft tokens that the LLM lacks
    rebuild: str  # the fix in errors about an unreadable file


@dataclass(frozen=True, slots=True)
class DrafterRecord:
    """What there is to know of a drafter besides its code."""

    name: str  # in the sources of a draft plan, and of the file in runtime/drafters/ with its code
    help: str  # what it drafts from, in a few words
    # Its position in draft plans that name no sources: low cost first. None: it drafts only if a plan names it.
    order: int | None = None
    options: tuple[DraftOption, ...] = ()
    runs_ssms: bool = False  # it is a source once for each SSM of the artifact
    table: DraftTable | None = None  # what it needs from the artifact

    def sources(self, ssms: int) -> tuple[str, ...]:
        """Its names in draft plans for an artifact with this many SSMs: "ssm", "ssm2", ..."""
        if not self.runs_ssms:
            return (self.name,)
        return tuple(self.name if i == 0 else f"{self.name}{i + 1}" for i in range(ssms))

    def is_among(self, sources: Collection[str]) -> bool:
        """Whether one of its names is among the sources of a draft plan."""
        return any(name in sources for name in self.sources(MAX_SSMS))


def drafter_records() -> tuple[DrafterRecord, ...]:
    """Every drafter by ``order``, those without one last; imports each file once."""
    import flexspec.drafters as package

    return _records(tuple(package.__path__))


@cache
def _records(folders: tuple[str, ...]) -> tuple[DrafterRecord, ...]:
    names = [module.name for module in pkgutil.iter_modules(folders) if module.name != "record"]
    records: list[DrafterRecord] = [importlib.import_module(f"flexspec.drafters.{name}").DRAFTER for name in names]
    for name, record in zip(names, records, strict=True):
        assert record.name == name, f"flexspec/drafters/{name}.py declares {record.name}"
    options = [option.name for record in records for option in record.options]
    assert len(set(options)) == len(options), f"two drafters have the same option: {sorted(options)}"
    return tuple(sorted(records, key=lambda record: (record.order is None, record.order or 0, record.name)))


def source_names() -> tuple[str, ...]:
    """Every source that a draft plan can name."""
    return tuple(name for record in drafter_records() for name in record.sources(MAX_SSMS))


def ssm_names() -> tuple[str, ...]:
    """The sources that run an SSM, in the order of the artifact's SSMs."""
    return tuple(name for record in drafter_records() if record.runs_ssms for name in record.sources(MAX_SSMS))


def owner_of(option: str) -> DrafterRecord:
    """The drafter that has the option."""
    return next(record for record in drafter_records() if option in [each.name for each in record.options])


def draft_options() -> tuple[DraftOption, ...]:
    """The options of all drafters."""
    return tuple(option for record in drafter_records() for option in record.options)

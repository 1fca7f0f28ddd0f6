"""From a drafter's name in a draft plan to the drafter: its file in this folder is found by its presence.

Such a file has the name of its record in flexspec/drafters/ and a function ``make(inputs: DrafterInputs) -> Drafter``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from flexspec.compiler.artifact.model_record import PartRecord
from flexspec.draft_plan import DraftPlan
from flexspec.drafters.record import DrafterRecord
from flexspec.runtime.drafters.base import Drafter
from flexspec.runtime.executors.step import Executor


@dataclass(frozen=True, slots=True)
class DrafterInputs:
    """What a drafter is made from."""

    source: str  # its name in draft plans: "suffix", "ssm2"
    plans: tuple[DraftPlan, ...]  # that draft with it, at least one
    vocab_size: int  # of the LLM
    table: Mapping[str, NDArray[Any]] | None = None  # checked; for a drafter whose record has a table
    ssm: tuple[PartRecord, Executor] | None = None  # for a drafter that runs an SSM


def make_drafter(record: DrafterRecord, inputs: DrafterInputs) -> Drafter:
    """The drafter of a record. Raises CapacityError for trees that its model cannot run."""
    make: Callable[[DrafterInputs], Drafter] = importlib.import_module(f"flexspec.runtime.drafters.{record.name}").make
    return make(inputs)

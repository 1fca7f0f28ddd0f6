"""From an artifact and ``--draft`` to drafters: the draft plan of each batch size, and the drafters it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.model_record import PartRecord
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.draft_plan import DraftLadder, DraftPlan
from flexspec.drafters.record import DrafterRecord, drafter_records, ssm_names
from flexspec.errors import ArtifactError, RequestError
from flexspec.runtime.drafters.base import Drafter, ModelDrafter
from flexspec.runtime.drafters.make import DrafterInputs, make_drafter
from flexspec.runtime.executors.step import Executor
from flexspec.runtime.open.serve_options import DEFAULT_DRAFT

_OFF = DraftPlan(method="off")


def choose_ladder(text: str, artifact: OpenedArtifact) -> DraftLadder:
    """The requested draft plan for every batch size; "auto": the artifact's.

    A plan that names no sources gets all that the artifact has, except those that must be named.
    Raises RequestError for an invalid draft plan, ArtifactError for sources that the artifact does not have.
    """
    records, plan = _records(artifact), artifact.plan
    sources = _names(records, artifact)
    if text == DEFAULT_DRAFT:
        return DraftLadder(tuple((batch, _offered(draft, sources)) for batch, draft in plan.ladder.rungs))
    placed = _names([record for record in records if record.order is not None], artifact)
    parsed = DraftPlan.parse(text, placed)
    missing = [source for source in parsed.sources if source not in sources]
    if missing and parsed.method != "off":
        raise ArtifactError(
            f"the artifact holds no {', '.join(missing)} for --draft {text}",
            f"sources among {', '.join(sources)}",
            "compile it with --ssm DIR, or name other sources",
        )
    return DraftLadder.of(parsed)


def _offered(stored: DraftPlan, sources: Sequence[str]) -> DraftPlan:
    """The plan with those of its sources that the artifact has."""
    offered = tuple(source for source in stored.sources if source in sources)
    if stored.method == "off" or not offered:
        return _OFF
    try:
        return stored.with_sources(offered)
    except RequestError:  # a static tree without its SSM
        return _OFF


def _records(artifact: OpenedArtifact) -> list[DrafterRecord]:
    """The drafters whose data the artifact has."""
    members = artifact.files.names()
    return [
        record for record in drafter_records() if record.table is None or layout.drafter_table(record.name) in members
    ]


def _names(records: Sequence[DrafterRecord], artifact: OpenedArtifact) -> tuple[str, ...]:
    """The names of these drafters' sources in draft plans of the artifact."""
    ssms = len(artifact.record.models) - 1
    return tuple(source for record in records for source in record.sources(ssms))


def model_free_drafters(artifact: OpenedArtifact, ladder: DraftLadder, vocab_size: int) -> list[Drafter]:
    """The drafters of the ladder that run no model. Raises ArtifactError for a table that is not the LLM's."""
    drafters = []
    for record in drafter_records():
        if record.name in ladder.sources and not record.runs_ssms:
            table = _table(artifact, record, vocab_size)
            inputs = DrafterInputs(record.name, _plans(ladder, record.name), vocab_size, table)
            drafters.append(make_drafter(record, inputs))
    return drafters


def _table(artifact: OpenedArtifact, record: DrafterRecord, vocab_size: int) -> Mapping[str, NDArray[Any]] | None:
    if record.table is None:
        return None
    file = layout.drafter_table(record.name)
    arrays = artifact.files.tensors(file)
    record.table.check(arrays, vocab_size, file)
    return arrays


def _plans(ladder: DraftLadder, source: str) -> tuple[DraftPlan, ...]:
    return tuple(plan for plan in ladder.plans if plan.method != "off" and source in plan.sources)


def ssm_drafter(part: PartRecord, executor: Executor, ladder: DraftLadder, vocab_size: int) -> ModelDrafter:
    """The drafter of an SSM over its executor, which runs every plan of the ladder that has it.

    Raises ArtifactError for an SSM of another vocabulary, CapacityError for trees that do not fit its steps.
    """
    if part.vocab_size != vocab_size:
        raise ArtifactError(
            f"{part.name} has {part.vocab_size} tokens", f"the LLM's {vocab_size}", "compile the model again"
        )
    record = next(record for record in drafter_records() if record.runs_ssms and part.name in ssm_names())
    inputs = DrafterInputs(part.name, _plans(ladder, part.name), vocab_size, ssm=(part, executor))
    drafter = make_drafter(record, inputs)
    assert isinstance(drafter, ModelDrafter), f"{record.name} runs a model"
    return drafter

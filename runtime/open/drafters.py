"""From an artifact and ``--draft`` to drafters: which draft plan each batch size gets, and what drafts in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.model_record import PartRecord
from flexspec.compiler.artifact.ngram_table import check_table, check_vocabulary
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.draft_plan import DraftLadder, DraftPlan
from flexspec.errors import ArtifactError, RequestError
from flexspec.runtime.drafters.base import Drafter
from flexspec.runtime.drafters.ngram import NgramDrafter, NgramModel
from flexspec.runtime.drafters.ssm import SsmDrafter
from flexspec.runtime.drafters.suffix import SuffixDrafter
from flexspec.runtime.executors.step import Executor
from flexspec.runtime.open.serve_options import DEFAULT_DRAFT

_OFF = DraftPlan(method="off")


def choose_ladder(text: str, artifact: OpenedArtifact) -> DraftLadder:
    """The draft plan asked for, for every batch size, with all sources unless it names its own; "auto": the artifact's.

    Raises RequestError for a text that is no draft plan, ArtifactError for sources that the artifact has not.
    """
    sources, plan = _sources(artifact), artifact.plan
    if text == DEFAULT_DRAFT:
        return DraftLadder(tuple((batch, _offered(draft, sources)) for batch, draft in plan.ladder.rungs))
    parsed = DraftPlan.parse(text)
    if parsed.method in ("chain", "budget") and "sources=" not in text:
        return DraftLadder.of(replace(parsed, sources=sources))
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
    kept = tuple(source for source in stored.sources if source in sources)
    if stored.method == "off" or not kept:
        return _OFF
    try:
        return replace(stored, sources=kept)
    except RequestError:  # a static tree without its SSM
        return _OFF


def _sources(artifact: OpenedArtifact) -> tuple[str, ...]:
    """Names of all sources of drafts that the artifact has."""
    table = ("ngram",) if layout.NGRAM_TABLE in artifact.files.names() else ()
    return ("suffix", *table, *(part.name for part in artifact.record.models[1:]))


def cheap_drafters(artifact: OpenedArtifact, ladder: DraftLadder, vocab_size: int) -> list[Drafter]:
    """The drafters of the ladder that run no model. Raises ArtifactError for a table that is not the LLM's."""
    made: list[Drafter] = [SuffixDrafter()]
    if "ngram" in ladder.sources:
        table = artifact.files.tensors(layout.NGRAM_TABLE)
        check_table(table, layout.NGRAM_TABLE)
        check_vocabulary(table, vocab_size, layout.NGRAM_TABLE)
        made.append(NgramDrafter(NgramModel(table)))
    return made


def ssm_drafter(part: PartRecord, executor: Executor, ladder: DraftLadder, vocab_size: int) -> SsmDrafter:
    """The drafter of an SSM over its executor, which runs every plan of the ladder that has it.

    Raises ArtifactError for an SSM of another vocabulary, CapacityError for trees that its steps have no room for.
    """
    if part.vocab_size != vocab_size:
        raise ArtifactError(
            f"{part.name} has {part.vocab_size} tokens", f"the LLM's {vocab_size}", "compile the model again"
        )
    plans = [plan for plan in ladder.plans if plan.method != "off" and part.name in plan.sources]
    made = SsmDrafter(
        executor,
        plans[0].expansion,
        vocab_size,
        keep_ids=None if part.keep_ids is None else np.array(part.keep_ids, np.int64),
        reads_features=bool(part.reads_features),
        sampled=plans[0].sampled,
        name=part.name,
    )
    for plan in plans:  # a tree that cannot be run is refused now, not when its batch size comes
        made.use(plan)
    return made

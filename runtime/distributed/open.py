"""Opens this process's rank of an artifact's plan: its graph, program and weights, and its seat among the others."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.compiler.artifact.rank_record import NO_STAGE, RankRecord, several_ranks
from flexspec.draft_plan import DraftLadder
from flexspec.errors import PlanError
from flexspec.runtime.distributed.drafts import DraftHost
from flexspec.runtime.distributed.executor import DistributedExecutor
from flexspec.runtime.distributed.follow import Follower
from flexspec.runtime.distributed.group import Seat
from flexspec.runtime.distributed.message import Room
from flexspec.runtime.distributed.processes import this_rank
from flexspec.runtime.distributed.shards import CpuShard, Shard
from flexspec.runtime.drafters.base import ModelDrafter
from flexspec.runtime.executors.cpu_rank import CpuRank
from flexspec.runtime.executors.step import Executor
from flexspec.runtime.open.capacity import check_room, context_tokens, ssm_pages, ssms_of
from flexspec.runtime.open.drafters import choose_ladder, ssm_drafter
from flexspec.runtime.open.models import choose_isa, gpu_models, open_backend, open_cpu_rank
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.types import PAGE_TOKENS

Watch = Callable[[CpuRank], object]  # is shown a rank's program before its first step


def open_leader(
    artifact: OpenedArtifact, ladder: DraftLadder, options: ServeOptions, watch: Watch | None = None
) -> DistributedExecutor:
    """Rank 0's executor, once all ranks have joined. Raises ArtifactError, CapacityError, PlanError, RuntimeError."""
    llm = artifact.llm
    records, room = several_ranks(artifact.ranks, artifact.name), _room(options)
    shard = _shard(artifact, ladder, records[0], options, watch)
    seat = _join(artifact, records, room, options)
    shard.join(seat)
    return DistributedExecutor(
        seat, shard, room, source=_source(records), vocab_size=llm.outputs, feature_columns=llm.feature_columns,
        stage_ranks=[record.rank for record in records if record.stage != NO_STAGE], max_positions=llm.max_positions,
    )  # fmt: skip


def run_follower(path: Path, options: ServeOptions, watch: Watch | None = None) -> None:
    """All that a rank other than 0 does, to its end. Raises as ``open_leader``, and EngineError.

    Signals that end a server are left to rank 0, which lets running answers finish and then tells the end; a rank goes
    at once when rank 0 is gone.
    """
    artifact = OpenedArtifact.at(path, check_digests=options.checks)
    ladder = choose_ladder(options.draft, artifact)
    records, room = several_ranks(artifact.ranks, artifact.name), _room(options)
    rank = this_rank().rank
    if not 0 < rank < len(records):
        raise PlanError(f"rank {rank}", f"ranks 0 to {len(records) - 1}", f"start it with --ranks {len(records)}")
    if this_rank().on_this_host[0] == rank:  # the first on its host; rank 0 does so for its own
        check_room(artifact, ladder, options, this_rank().on_this_host)
    holds = records[rank].stage != NO_STAGE
    shard = _shard(artifact, ladder, records[rank], options, watch) if holds else None
    drafters, opened = _drafters(artifact, ladder, options)
    seat = _join(artifact, records, room, options)
    if shard is not None:
        shard.join(seat)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    Follower(
        seat, shard, DraftHost(drafters) if drafters else None, room, gives=_source(records) == rank,
        vocab_size=artifact.llm.outputs, feature_columns=artifact.llm.feature_columns,
    ).run()  # fmt: skip
    for each in opened:
        each.close()
    if shard is not None:
        shard.close()
    seat.close()


def _drafters(
    artifact: OpenedArtifact, ladder: DraftLadder, options: ServeOptions
) -> tuple[list[ModelDrafter], list[Executor]]:
    """The drafters of the SSMs that live on this rank, and their executors."""
    rank, vocab_size = this_rank().rank, artifact.llm.outputs
    context, _ = context_tokens(artifact, ladder, options)
    here = [(part, ranks) for part, ranks in ssms_of(artifact, ladder) if rank in ranks]
    if not here:
        return [], []
    _, executor_of = open_backend(artifact, ladder, options)
    opened = [
        executor_of(part, replace(options, kv_tokens=ssm_pages(options, ranks, context) * PAGE_TOKENS))
        for part, ranks in here
    ]
    made = [ssm_drafter(part, each, ladder, vocab_size) for (part, _), each in zip(here, opened, strict=True)]
    return made, opened


def _room(options: ServeOptions) -> Room:
    return Room(max(options.max_rows, options.max_requests), options.pages)


def _source(records: tuple[RankRecord, ...]) -> int:
    """The rank that has the results for rank 0: itself, if it is in the last stage."""
    return next(record.rank for record in records if record.results)


def _join(artifact: OpenedArtifact, records: tuple[RankRecord, ...], room: Room, options: ServeOptions) -> Seat:
    manifest = hashlib.sha256((artifact.files.root / layout.MANIFEST).read_bytes()).hexdigest()
    groups = sorted({group for record in records for group in record.groups})
    return Seat(f"{manifest} {room} {options.draft} {options.context_tokens}", len(records), groups, options.device)


def _shard(
    artifact: OpenedArtifact, ladder: DraftLadder, record: RankRecord, options: ServeOptions, watch: Watch | None
) -> Shard:
    if options.device != "cpu":
        room = _room(options)
        return gpu_models(artifact, ladder, options).shard(layout.rank_name(record.rank), room.pages, room.max_rows)
    program = open_cpu_rank(artifact, choose_isa(artifact), record.rank, options)
    if watch is not None:
        watch(program)
    return CpuShard(program)

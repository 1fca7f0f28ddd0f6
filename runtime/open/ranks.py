"""Opens this process's rank of an artifact's plan: its graph, program and weights, and its seat among the others."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.compiler.artifact.rank_record import NO_STAGE, RankRecord, several_ranks
from flexspec.errors import PlanError
from flexspec.runtime.distributed.agreement import Agreement
from flexspec.runtime.distributed.drafts import DraftHost
from flexspec.runtime.distributed.executor import DistributedExecutor
from flexspec.runtime.distributed.follow import Follower
from flexspec.runtime.distributed.group import Seat
from flexspec.runtime.distributed.processes import this_rank
from flexspec.runtime.distributed.shards import CpuShard, Shard
from flexspec.runtime.drafters.base import ModelDrafter
from flexspec.runtime.executors.room import Room
from flexspec.runtime.executors.step import Executor
from flexspec.runtime.executors.step_times import StepTimes
from flexspec.runtime.open.capacity import check_room, context_tokens, ssm_pages, ssms_of
from flexspec.runtime.open.drafters import ssm_drafter
from flexspec.runtime.open.opening import Opening
from flexspec.runtime.open.serve_options import ServeOptions

OnShard = Callable[[Shard], object]  # called with this rank's shard before its first step


def open_leader(opening: Opening, on_shard: OnShard | None = None) -> DistributedExecutor:
    """Rank 0's executor, once all ranks have joined. Raises ArtifactError, CapacityError, PlanError, RuntimeError."""
    artifact, room = opening.artifact, opening.options.room
    llm, records = artifact.llm, several_ranks(artifact.ranks, artifact.name)
    shard = _shard(opening, 0, on_shard)
    seat = _join(opening, records)
    shard.join(seat)
    return DistributedExecutor(
        seat, shard, room, source=_source(records), vocab_size=llm.outputs, feature_columns=llm.feature_columns,
        stage_ranks=[record.rank for record in records if record.stage != NO_STAGE], max_positions=llm.max_positions,
    )  # fmt: skip


def run_follower(path: Path, options: ServeOptions, on_shard: OnShard | None = None) -> None:
    """Run a rank other than 0 until rank 0 stops it. Raises as ``open_leader``, and EngineError.

    Signals that end a server are left to rank 0, which lets running answers finish and then stops the others; a rank
    ends at once when rank 0 is gone.
    """
    opening = Opening.of(OpenedArtifact.at(path, check_digests=options.checks), options)
    artifact = opening.artifact
    records = several_ranks(artifact.ranks, artifact.name)
    rank = this_rank().rank
    if not 0 < rank < len(records):
        raise PlanError(f"rank {rank}", f"ranks 0 to {len(records) - 1}", f"start it with --ranks {len(records)}")
    if this_rank().on_this_host[0] == rank:  # the first on its host; rank 0 checks its own
        check_room(artifact, opening.ladder, options, this_rank().on_this_host)
    holds = records[rank].stage != NO_STAGE
    shard = _shard(opening, rank, on_shard) if holds else None
    drafters, executors = _drafters(opening, rank)
    seat = _join(opening, records)
    if shard is not None:
        shard.join(seat)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    host = DraftHost(drafters) if drafters else None
    Follower(seat, shard, host, options.room, sends_results=_source(records) == rank).run()
    for executor in executors:
        executor.close()
    if shard is not None:
        shard.close()
    seat.close()


def times_of(shard: Shard) -> StepTimes:
    """The times of a shard's steps from now on: only CPU programs have a clock."""
    assert isinstance(shard, CpuShard), "only plans of this machine's CPU are measured"
    return shard.keep_times()


def _drafters(opening: Opening, rank: int) -> tuple[list[ModelDrafter], list[Executor]]:
    """The drafters of the SSMs on a rank, and their executors."""
    artifact, ladder, options = opening.artifact, opening.ladder, opening.options
    context, _ = context_tokens(artifact, ladder, options)
    drafters, executors = [], []
    for part, ranks in ssms_of(artifact, ladder):
        if rank in ranks:
            room = Room(options.room.max_rows, ssm_pages(options, ranks, context))
            executors.append(opening.kernels.executor(part.name, room))
            drafters.append(ssm_drafter(part, executors[-1], ladder, artifact.llm.outputs))
    return drafters, executors


def _source(records: tuple[RankRecord, ...]) -> int:
    """The rank that has the results for rank 0: itself, if it is in the last stage."""
    return next(record.rank for record in records if record.results)


def _join(opening: Opening, records: tuple[RankRecord, ...]) -> Seat:
    options = opening.options
    agreement = Agreement(
        artifact=opening.artifact.files.fingerprint(),
        device=options.device,
        max_rows=options.room.max_rows,
        pages=options.room.pages,
        draft=options.draft,
        context_tokens=options.context_tokens,
    )
    groups = sorted({group for record in records for group in record.groups})
    return Seat(agreement, len(records), groups, opening.backend.process_group)


def _shard(opening: Opening, rank: int, on_shard: OnShard | None) -> Shard:
    shard = opening.kernels.shard(rank, opening.options.room)
    if on_shard is not None:
        on_shard(shard)
    return shard

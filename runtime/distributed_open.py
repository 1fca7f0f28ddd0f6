"""Opens this process's rank of an artifact's plan: its graph, program and weights, and its seat among the others."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

from flexspec.compiler.artifact import Artifact, open_artifact
from flexspec.compiler.manifest import MANIFEST_NAME
from flexspec.compiler.model_record import PartRecord, record_from_json
from flexspec.compiler.rank_record import RANKS_FILE, RankRecord, folder_of, ranks_from_json
from flexspec.errors import ArtifactError, PlanError
from flexspec.runtime.cpu_rank import CpuRank
from flexspec.runtime.distributed_executor import DistributedExecutor, follow
from flexspec.runtime.distributed_group import Seat
from flexspec.runtime.distributed_message import Room
from flexspec.runtime.open_engine import ServeOptions, choose_isa, default_threads
from flexspec.text import parse_graph


def open_leader(artifact: Artifact, llm: PartRecord, options: ServeOptions) -> DistributedExecutor:
    """Rank 0's executor, once all ranks have joined. Raises ArtifactError, CapacityError, PlanError, RuntimeError."""
    records, room = _records(artifact), _room(options)
    shard = _shard(artifact, records[0], options)
    seat = _join(artifact, records, room, options)
    return DistributedExecutor(
        seat, shard, room, source=_source(records), vocab_size=llm.outputs, feature_columns=llm.feature_columns,
        max_positions=llm.max_positions,
    )  # fmt: skip


def run_follower(path: Path, options: ServeOptions) -> None:
    """All that a rank other than 0 does, to its end. Raises as ``open_leader``, and EngineError.

    Signals that end a server are left to rank 0, which lets running answers finish and then tells the end; a rank goes
    at once when rank 0 is gone.
    """
    artifact = open_artifact(path, check_digests=options.checks)
    llm = record_from_json(artifact.read_json("model.json")).models[0]
    records, room, rank = _records(artifact), _room(options), int(os.environ["RANK"])
    if not 0 < rank < len(records):
        raise PlanError(f"rank {rank}", f"ranks 0 to {len(records) - 1}", f"start it with --ranks {len(records)}")
    shard = _shard(artifact, records[rank], options)
    seat = _join(artifact, records, room, options)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    follow(
        seat, shard, room, gives=_source(records) == rank, vocab_size=llm.outputs,
        feature_columns=llm.feature_columns,
    )  # fmt: skip
    shard.close()
    seat.close()


def _records(artifact: Artifact) -> tuple[RankRecord, ...]:
    if RANKS_FILE not in artifact.names():
        raise ArtifactError(
            f"{artifact.root.name} holds a plan of one rank",
            "a plan of several",
            "compile it with --plan PLAN.json, or serve it without --ranks",
        )
    return ranks_from_json(artifact.read_json(RANKS_FILE), artifact.root.name)


def _room(options: ServeOptions) -> Room:
    return Room(max(options.max_rows, options.max_requests), options.pages)


def _source(records: tuple[RankRecord, ...]) -> int:
    """The rank that has the results for rank 0: itself, if it is in the last stage."""
    return next(record.rank for record in records if record.results)


def _join(artifact: Artifact, records: tuple[RankRecord, ...], room: Room, options: ServeOptions) -> Seat:
    manifest = hashlib.sha256((artifact.root / MANIFEST_NAME).read_bytes()).hexdigest()
    groups = sorted({group for record in records for group in record.groups})
    return Seat(f"{manifest} {room}", len(records), groups, options.device)


def _shard(artifact: Artifact, record: RankRecord, options: ServeOptions) -> CpuRank:
    if options.device != "cpu":
        raise PlanError(f"--device {options.device} with {RANKS_FILE}", "--device cpu", "GPU ranks are not there yet")
    name, room = folder_of(record.rank), _room(options)
    tensors = artifact.tensors(f"weights/{name}.safetensors")
    missing = [tensor for tensor in record.weights if tensor not in tensors]
    if missing:
        raise ArtifactError(f"no tensor {missing[0]} for {name}", "every weight of its program", "compile it again")
    local = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return CpuRank.built(
        record.rank,
        parse_graph(artifact.read_bytes(f"graph/{name}.fsg").decode()),
        artifact.file(f"kernels/cpu/{name}/{choose_isa(artifact)}.so"),
        [tensors[tensor] for tensor in record.weights],
        pages=room.pages,
        max_rows=room.max_rows,
        threads=options.threads or max(1, default_threads() // local),
    )

"""The graphs of all ranks as they are compiled: the model's graph cut first, then the passes on each rank's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flexspec.compiler.artifact.plan import Stage
from flexspec.compiler.partition.check_ranks import check_ranks
from flexspec.compiler.partition.cut_ranks import partition
from flexspec.compiler.partition.rank_part import RankPart
from flexspec.compiler.passes.pipeline import Pass, run_passes
from flexspec.graph import Graph


def lower_ranks(
    graph: Graph,
    stages: Sequence[Stage],
    passes: Sequence[Pass],
    dump_dir: Path | None = None,
    *,
    prefer: Mapping[str, str] | None = None,
) -> tuple[RankPart, ...]:
    """The graph cut for every rank of the stages (``prefer`` as for partition), each part then lowered by the passes.

    With ``dump_dir`` the dumps of a rank stand in ``rankN`` there, ``00_input.fsg`` being its graph before the passes.
    Raises PartitionError for stages that do not fit the graph, and what run_passes raises. That the parts still fit
    together is checked at the end.
    """
    parts = []
    for part in partition(graph, stages, prefer=prefer):
        folder = dump_dir / f"rank{part.rank}" if dump_dir is not None else None
        lowered = run_passes(part.graph, passes, folder)
        read = {value.name for value in lowered.inputs}
        weights = tuple(weight for weight in part.weights if weight.name in read)
        parts.append(replace(part, graph=lowered, weights=weights))
    check_ranks(parts)
    return tuple(parts)

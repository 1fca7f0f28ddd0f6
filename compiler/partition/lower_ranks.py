"""The graphs of all ranks as they are compiled: the model's graph is cut, then every part is lowered."""

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
    """Cut the graph for every rank of the stages (``prefer`` as for partition), and lower every part by the passes.

    With ``dump_dir``, the dumps of rank N are in ``rankN`` there; ``00_input.fsg`` is its graph before the passes. The
    parts are checked against each other again at the end. Raises PartitionError for stages that do not fit the graph,
    and whatever run_passes raises.
    """
    parts = []
    for part in partition(graph, stages, prefer=prefer):
        folder = dump_dir / f"rank{part.rank}" if dump_dir is not None else None
        lowered = run_passes(part.graph, passes, folder)
        used = {value.name for value in lowered.inputs}
        weights = tuple(weight for weight in part.weights if weight.name in used)
        parts.append(replace(part, graph=lowered, weights=weights))
    check_ranks(parts)
    return tuple(parts)

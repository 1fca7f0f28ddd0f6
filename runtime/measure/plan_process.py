"""A process of a plan that is measured, run as ``python -m flexspec.runtime.measure.plan_process SETUP`` (JSON).

Rank 0 reads from stdin which rounds to run, a line of JSON each, and answers on stdout with a line each; the others
follow it. The end of the input ends all ranks, which then write the times of their steps to the folder of the setup.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from flexspec.errors import FlexspecError
from flexspec.host.exits import rank_gone
from flexspec.runtime.distributed.processes import this_rank
from flexspec.runtime.executors.step_times import StepTimes
from flexspec.runtime.measure.round_runs import RoundRequest, RoundRuns
from flexspec.runtime.open.serve_options import ServeOptions


@dataclass(frozen=True, slots=True)
class PlanProcess:
    """The setup that all processes of a plan are started with."""

    artifact: str
    folder: str  # where times are written
    kv_tokens: int
    requests: int  # at most
    max_rows: int

    def options(self) -> ServeOptions:
        return ServeOptions(
            draft="off", threads=1, kv_tokens=self.kv_tokens, max_requests=self.requests, max_rows=self.max_rows,
            measure=False, checks=False,
        )  # fmt: skip


def times_file(setup: PlanProcess, part: str, draft: str = "") -> Path:
    """Where the times of "rankN" are written, and for each draft plan those of rank 0's "llm" and of each SSM."""
    return Path(setup.folder) / f"{part}{draft.encode().hex()}.npz"


def _save(path: Path, times: StepTimes) -> None:
    arrays = times.arrays()
    np.savez(path, calls=arrays["calls"], stamps=arrays["stamps"])


def _lead(setup: PlanProcess, *, several: bool) -> None:
    """Rank 0."""
    runs = RoundRuns(Path(setup.artifact), setup.options(), several=several)
    drafts: dict[str, None] = {}
    for line in sys.stdin:
        request = RoundRequest(**json.loads(line))
        drafts[request.draft] = None
        print(json.dumps([asdict(measured) for measured in runs.run(request)]), flush=True)
    for draft in drafts:
        opened = runs.open(draft)
        _save(times_file(setup, "llm.", draft), opened.llm)
        for number, times in enumerate(opened.ssms):
            _save(times_file(setup, f"ssm{number}.", draft), times)
    runs.close()


def _follow(setup: PlanProcess, rank: int) -> None:
    """Any other rank, until rank 0 stops."""
    from flexspec.runtime.open.ranks import run_follower, times_of

    times: list[StepTimes] = []
    run_follower(Path(setup.artifact), setup.options(), lambda shard: times.append(times_of(shard)))
    _save(times_file(setup, f"rank{rank}"), times[0])


def main() -> int:
    setup = PlanProcess(**json.loads(sys.argv[1]))
    place = this_rank()
    rank = place.rank
    try:
        if rank:
            _follow(setup, rank)
        else:
            _lead(setup, several=place.ranks > 1)
    except FlexspecError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:  # torch.distributed's
        print(f"rank {rank}: {rank_gone(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A process of a plan that is measured, run as ``python -m flexspec.runtime.measure.plan_process JOB``, JOB being JSON.

Rank 0 reads from stdin which rounds to run, a line of JSON each, and answers on stdout with a line each; the others
follow it. The end of the input ends all ranks, which then leave the times of their steps in the job's folder.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from flexspec.errors import FlexspecError
from flexspec.exits import rank_gone
from flexspec.runtime.executors.step_times import StepTimes
from flexspec.runtime.measure.round_runs import Ask, RoundRuns
from flexspec.runtime.open.serve_options import ServeOptions


@dataclass(frozen=True, slots=True)
class Job:
    """What a process is started with."""

    artifact: str
    folder: str  # where times are left
    kv_tokens: int
    requests: int  # at most
    max_rows: int

    def options(self) -> ServeOptions:
        return ServeOptions(
            draft="off", threads=1, kv_tokens=self.kv_tokens, max_requests=self.requests, max_rows=self.max_rows,
            measure=False, checks=False,
        )  # fmt: skip


def times_file(job: Job, part: str, draft: str = "") -> Path:
    """Where the times of "rankN" are left, and for each draft plan those of rank 0's "llm" and of each SSM."""
    return Path(job.folder) / f"{part}{draft.encode().hex()}.npz"


def _save(path: Path, times: StepTimes) -> None:
    arrays = times.arrays()
    np.savez(path, calls=arrays["calls"], stamps=arrays["stamps"])


def _lead(job: Job, *, several: bool) -> None:
    """Rank 0."""
    runs = RoundRuns(Path(job.artifact), job.options(), several=several)
    drafts: dict[str, None] = {}
    for line in sys.stdin:
        ask = Ask(**json.loads(line))
        drafts[ask.draft] = None
        print(json.dumps([asdict(each) for each in runs.run(ask)]), flush=True)
    for draft in drafts:
        opened = runs.open(draft)
        _save(times_file(job, "llm.", draft), opened.llm)
        for number, times in enumerate(opened.ssms):
            _save(times_file(job, f"ssm{number}.", draft), times)
    runs.close()


def _follow(job: Job, rank: int) -> None:
    """Any other rank, to its end."""
    from flexspec.runtime.distributed.open import run_follower

    kept: list[StepTimes] = []
    run_follower(Path(job.artifact), job.options(), lambda program: kept.append(program.keep_times()))
    _save(times_file(job, f"rank{rank}"), kept[0])


def main() -> int:
    job = Job(**json.loads(sys.argv[1]))
    several, rank = int(os.environ.get("WORLD_SIZE", "1")) > 1, int(os.environ.get("RANK", "0"))
    try:
        if rank:
            _follow(job, rank)
        else:
            _lead(job, several=several)
    except FlexspecError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:  # torch.distributed's
        print(f"rank {rank}: {rank_gone(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

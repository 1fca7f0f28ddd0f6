"""The half of a peer that runs in the peer's own environment: standard library only, besides the peer itself.

A worker script passes :func:`run_worker` a function that completes prompts; this file reads the prompts, keeps the
definitions of times in one place and writes the result.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One greedy measurement."""

    model: Path
    prompts: list[list[int]]  # token ids
    eos_ids: list[int]
    max_new_tokens: int
    threads: int
    batch: int  # requests at a time


@dataclass(frozen=True)
class Completion:
    """Output of one prompt."""

    output_ids: list[int]
    prefill_s: float  # until the first new token
    decode_s: float  # after it


@dataclass(frozen=True)
class Measurement:
    """What a worker returns."""

    version: str
    completions: list[Completion]
    wall_s: float  # of all prompts together


def run_worker(measure: Callable[[Job], Measurement]) -> None:
    """Parse the job, run it, write the result as JSON."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--prompts", "--out"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--max-new-tokens", "--threads", "--batch"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    prepared = json.loads(args.prompts.read_text())
    job = Job(
        model=args.model,
        prompts=[prompt["ids"] for prompt in prepared["prompts"]],
        eos_ids=prepared["eos_ids"],
        max_new_tokens=args.max_new_tokens,
        threads=args.threads,
        batch=args.batch,
    )
    args.out.write_text(json.dumps(asdict(measure(job))))


def one_by_one(job: Job, version: str, complete: Callable[[list[int]], Completion]) -> Measurement:
    """Complete the prompts in turn, after one short run that is not counted (page faults, lazy set-up)."""
    complete(job.prompts[0][:8])
    begin = time.perf_counter()
    completions = [complete(prompt) for prompt in job.prompts]
    return Measurement(version, completions, time.perf_counter() - begin)


def generate(job: Job, feed: Callable[[list[int]], int], prompt: list[int]) -> Completion:
    """Greedy loop around ``feed``, which takes new tokens of one sequence and returns the next token."""
    begin = time.perf_counter()
    output = [feed(prompt)]
    first = time.perf_counter()
    while len(output) < job.max_new_tokens and output[-1] not in job.eos_ids:
        output.append(feed(output[-1:]))
    return Completion(output, first - begin, time.perf_counter() - first)


def pin_threads(threads: int) -> None:
    """Keep this process on the first ``threads`` processors it may use, so that every peer has the same machine."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:threads]))

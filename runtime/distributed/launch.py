"""Starts all ranks of this machine once, by torchrun's own agent, and reports how they ended; callers decide the rest.

Differences from the ``torchrun`` command: a signal goes to rank 0 alone, which lets running answers finish and then
stops the others; nothing is logged and no traceback printed; the exit code of each rank is kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from uuid import uuid4

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

_LOGGER = "torch.distributed.elastic"


class _Agent(LocalElasticAgent):
    """torchrun's agent, which polls the ranks ten times a second, and then forwards signals to rank 0 too."""

    def __init__(self, spec: WorkerSpec, signals: list[int]) -> None:
        super().__init__(spec, logs_specs=DefaultLogsSpecs(log_dir=os.devnull))  # else folders stay in /tmp
        self._signals = signals

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        while self._signals:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker_group.workers[0].id, self._signals.pop(0))
        result: RunResult = super()._monitor_workers(worker_group)
        return result


def run_ranks(module: str, arguments: Sequence[str], ranks: int, signals: list[int]) -> Mapping[int, int]:
    """Run ``python -m module arguments`` as ``ranks`` processes; returns the exit code of each rank that failed.

    A negative code is a signal. When one rank fails the others get SIGTERM, and SIGKILL after 30 s. Numbers that a
    signal handler appends to ``signals`` meanwhile are sent to rank 0. Call it from the main thread.
    """
    quiet = not os.environ.get("FLEXSPEC_DEBUG")
    logging.getLogger(_LOGGER).propagate = not quiet
    logging.getLogger(_LOGGER).addHandler(logging.NullHandler())  # without one, Python prints warnings itself
    # The agent would take over SIGTERM and SIGINT, and end with an exception; it may have this one.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    meeting = RendezvousParameters(
        backend="c10d", endpoint="localhost:0", run_id=str(uuid4()), min_nodes=1, max_nodes=1, local_addr="127.0.0.1"
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        rdzv_handler=get_rendezvous_handler(meeting),
        max_restarts=0,
        entrypoint=sys.executable,
        args=("-m", module, *arguments),
        local_addr="127.0.0.1",
    )
    try:
        result = _Agent(spec, signals).run()
    finally:
        spec.rdzv_handler.shutdown()
    return {rank: failure.exitcode for rank, failure in result.failures.items()}

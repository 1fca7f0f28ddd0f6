"""``flexspec serve X.fspec``: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexspec.runtime.engine.thread import EngineThread
    from flexspec.runtime.open.engine import OpenLlm
    from flexspec.runtime.open.serve_options import ServeOptions
    from flexspec.runtime.open.served import Served
    from flexspec.runtime.server.listen import Listener

EPILOG = """\
example:
  flexspec serve build/smollm2.fspec --port 8000
  curl -N http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Why is the sky blue?"}],
         "max_tokens": 128, "temperature": 0, "stream": true}'
(`make demo` puts the artifact there)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from flexspec.cli.running import add_run_arguments, draft_plans_help
    from flexspec.cli.serving.http_options import add_http_arguments
    from flexspec.cli.serving.launch import RESTARTS, restart_count

    parser.epilog = f"{draft_plans_help()}\n{EPILOG}"
    parser.add_argument("artifact", type=Path, help="an artifact made by flexspec compile")
    add_http_arguments(parser)
    parser.add_argument("--name", help="name of the model in the API (default: the artifact's file name)")
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="start N ranks on this machine with torchrun, for an artifact compiled with a plan of N ranks (--plan)",
    )
    parser.add_argument(
        "--restart",
        nargs="?",
        type=restart_count,
        const=RESTARTS,
        default=0,
        metavar="N",
        help=f"restart all ranks after one dies, up to N times in a row (without N: {RESTARTS})",
    )
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from flexspec.cli.ranks import check_launched, is_rank, run_rank
    from flexspec.cli.running import serve_options
    from flexspec.cli.serving.launch import launch

    options = serve_options(args)
    if is_rank():
        check_launched(args.restart)
        return run_rank(args.artifact, options, lambda open_llm: _serve_on_port(args, options, open_llm))
    if args.ranks != 1 or args.restart:
        launch(args)
    return _serve_on_port(args, options, None)


def _serve_on_port(args: argparse.Namespace, options: ServeOptions, open_llm: OpenLlm | None) -> int:
    from flexspec.cli.serving.http_options import reserve_address
    from flexspec.host.open_files import raise_open_files

    with suppress(OSError, RuntimeError):  # no stderr, or one without a descriptor: nothing could be said there
        faulthandler.enable(all_threads=False)  # a mapped weight file that is cut (SIGBUS) ends the process with a word
    if (few := raise_open_files()) is not None:
        print(f"flexspec serve: {few}", file=sys.stderr, flush=True)
    with reserve_address(args) as listener:  # a busy port must fail before any weight is read
        return _serve(args, options, listener, open_llm)


def _end_with_ranks(served: Served, thread: EngineThread) -> None:
    """End with lost ranks between steps too: a server that can no longer answer should not wait for a request."""
    from flexspec.runtime.distributed.executor import DistributedExecutor

    if isinstance(served.engine.executor, DistributedExecutor):
        served.engine.executor.on_loss(thread.fail)


def _serve(args: argparse.Namespace, options: ServeOptions, listener: Listener, open_llm: OpenLlm | None) -> int:
    from prometheus_client import CollectorRegistry

    from flexspec.cli.ranks import report_end
    from flexspec.cli.serving.http_options import door_options
    from flexspec.compiler.artifact import layout
    from flexspec.compiler.artifact.opened import OpenedArtifact
    from flexspec.compiler.artifact.opened_files import OpenedFiles
    from flexspec.runtime.distributed.processes import this_rank
    from flexspec.runtime.engine.thread import EngineThread
    from flexspec.runtime.open.engine import open_artifact_engine
    from flexspec.runtime.server.app import create_app
    from flexspec.runtime.server.metrics import Metrics
    from flexspec.runtime.server.requests import ServerLimits
    from flexspec.runtime.server.serve import serve

    door = door_options(args)
    metrics = Metrics(CollectorRegistry())
    artifact = OpenedArtifact.at(args.artifact, check_digests=options.checks)
    files = OpenedFiles(artifact.files)
    served = open_artifact_engine(artifact, options, metrics, open_llm)
    name = args.name or args.artifact.name.removesuffix(layout.SUFFIX)
    thread = EngineThread(served.engine)
    if open_llm is not None:
        _end_with_ranks(served, thread)
    end_watch = files.watch(
        lambda what: thread.fail(
            f"{args.artifact} was written while it was served ({what}); "
            "compile -o replaces an artifact without touching what is being served"
        )
    )
    limits = ServerLimits(served.context_tokens, default_max_tokens=args.default_max_tokens)
    app = create_app(served.engine, served.tokenizer, served.chat, name, metrics, limits, door)

    count = this_rank().ranks
    ranks = f"{count} ranks, " if count > 1 else ""

    def ready() -> None:
        print(
            f"flexspec: {name} on {listener.url} ({ranks}{served.isa}, draft {served.draft}, "
            f"context {served.context_tokens})",
            file=sys.stderr,
            flush=True,
        )

    try:
        code = serve(app, listener, on_ready=ready)
        failure = served.engine.load().failure
        if code and failure:
            report_end(failure)
        return code
    finally:
        end_watch()
        thread.close()
        served.close()

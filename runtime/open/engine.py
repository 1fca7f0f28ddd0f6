"""From an opened artifact to a running engine: executors, drafters, tokenizer, measured step costs.

Owns the assembly; each part is its own file. The CPU path imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.errors import ArtifactError
from flexspec.runtime.distributed.processes import this_rank
from flexspec.runtime.drafters.base import DraftsElsewhere, ModelDrafter
from flexspec.runtime.drafters.planned import PlannedDrafter
from flexspec.runtime.engine.engine import Engine
from flexspec.runtime.engine.observer import Observer
from flexspec.runtime.engine.scheduler import EngineLimits
from flexspec.runtime.executors.room import Room
from flexspec.runtime.executors.step import Executor, OverlappingExecutor
from flexspec.runtime.open.capacity import check_room, context_tokens, ssm_pages, ssms_of
from flexspec.runtime.open.drafters import model_free_drafters, ssm_drafter
from flexspec.runtime.open.opening import Opening
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.runtime.open.served import Served
from flexspec.runtime.open.step_costs import measure_steps
from flexspec.runtime.text.chat import ChatRenderer
from flexspec.runtime.text.tokenizer import Detokenizer, Tokenizer

OpenLlm = Callable[[Opening], Executor]


def open_engine(
    path: Path, options: ServeOptions, observer: Observer | None = None, open_llm: OpenLlm | None = None
) -> Served:
    """Open ``path`` and assemble its engine. ``open_llm`` opens the LLM's executor if it runs on several ranks.

    Raises ArtifactError, CapacityError, RequestError for a bad draft plan, ToolchainError for a device that is missing.
    """
    artifact = OpenedArtifact.at(path, check_digests=options.checks)
    return open_artifact_engine(artifact, options, observer, open_llm)


def open_artifact_engine(
    artifact: OpenedArtifact, options: ServeOptions, observer: Observer | None = None, open_llm: OpenLlm | None = None
) -> Served:
    """``open_engine`` of an artifact that is open already."""
    record, plan = artifact.record, artifact.plan
    opening = Opening.of(artifact, options)
    ladder, kernels = opening.ladder, opening.kernels
    context, longer_context = context_tokens(artifact, ladder, options)
    check_room(artifact, ladder, options, this_rank().on_this_host if open_llm else ())
    tokenizer = Tokenizer(artifact.files.read_bytes(layout.TOKENIZER), record.eos_ids, record.bos_id)
    chat = _chat(artifact)
    with ExitStack() as opened:
        llm = open_llm(opening) if open_llm else kernels.executor(artifact.llm.name, options.room)
        opened.callback(llm.close)
        drafters = model_free_drafters(artifact, ladder, llm.vocab_size)
        executors = [llm]
        for part, ranks in ssms_of(artifact, ladder):
            remote = llm if isinstance(llm, DraftsElsewhere) and ranks != (0,) else None
            local: ModelDrafter | None = None
            if remote is None or 0 in ranks:
                pages = ssm_pages(options, ranks, context) if remote else options.pages
                executors.append(kernels.executor(part.name, Room(options.room.max_rows, pages)))
                opened.callback(executors[-1].close)
                local = ssm_drafter(part, executors[-1], ladder, llm.vocab_size)
            if remote is not None:
                drafters.append(remote.drafter(part, ranks, local))
            elif local is not None:
                drafters.append(local)
        planned = PlannedDrafter(ladder, drafters)
        limits = EngineLimits(context, max_running=options.max_requests, longer_context=longer_context)
        count = plan.micro_batches_for if isinstance(llm, OverlappingExecutor) else _one
        engine = Engine(llm, planned, lambda: Detokenizer(tokenizer), record.eos_ids, limits, observer, count)
        if options.measure and ladder.drafts and opening.backend.times_itself:
            planned.step_cost, engine.plain_step_s = measure_steps(llm, planned.limits.max_nodes)
        opened.pop_all()
    return Served(record.name, engine, tokenizer, chat, plan, ladder, kernels.name, context, executors)


def _one(requests: int) -> int:
    """Micro-batches of one rank: two steps would only take turns."""
    return 1


def _chat(artifact: OpenedArtifact) -> ChatRenderer | None:
    if layout.CHAT_TEMPLATE not in artifact.files.names():
        return None
    try:
        template = artifact.files.read_bytes(layout.CHAT_TEMPLATE).decode()
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{layout.CHAT_TEMPLATE} is not UTF-8 ({error})", "a text", artifact.fix) from None
    return ChatRenderer(template, artifact.record.special_tokens)

"""What fits: the longest request, the pools of SSMs, and whether this host has the memory for all that it will run."""

from __future__ import annotations

from collections.abc import Sequence

from flexspec.arithmetic import ceil_div
from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.model_record import LLM, PartRecord
from flexspec.compiler.artifact.opened import OpenedArtifact
from flexspec.draft_plan import DraftLadder
from flexspec.errors import ArtifactError, CapacityError
from flexspec.kv_slots import longest_request, pages_of, request_slots
from flexspec.runtime.backends.registry import backend_of
from flexspec.runtime.open.host_memory import ModelPool, check_memory
from flexspec.runtime.open.serve_options import ServeOptions


def context_tokens(artifact: OpenedArtifact, ladder: DraftLadder, options: ServeOptions) -> tuple[int, str]:
    """Longest prompt plus output of one request, and how to allow a longer one ("" if it is the model's limit).

    The least of the model's limit, the pool's with one tree after the context, and the option.
    """
    nodes = ladder.worst.max_nodes
    room = longest_request(options.pages, nodes)
    if room < 2:
        raise CapacityError(
            f"a KV pool of {options.kv_tokens} tokens",
            f"at least {request_slots(2, nodes)} for trees of {nodes + 1} nodes",
            "raise --kv-tokens, or choose a smaller --draft",
        )
    model = artifact.llm.max_positions
    longest, why = (room, "raise --kv-tokens") if room < model else (model, "")
    asked = options.context_tokens
    if not asked or asked == longest:
        return longest, why
    if not 2 <= asked < longest:
        holds = f"what {options.kv_tokens} KV tokens hold besides a tree" if why else "the model's own"
        raise CapacityError(
            f"--context {asked} (tokens of a prompt and its output together)",
            f"2 to {longest}, {holds}",
            "choose --context in that range" + (f", or {why}" if why else ""),
        )
    return asked, "raise --context"


def ssms_of(artifact: OpenedArtifact, ladder: DraftLadder) -> list[tuple[PartRecord, tuple[int, ...]]]:
    """The SSMs that the ladder drafts with, and the ranks of each."""
    ssms, plan = artifact.record.models[1:], artifact.plan
    if len(ssms) != len(plan.ssm_ranks):
        raise ArtifactError(
            f"a plan for {len(plan.ssm_ranks)} SSMs", f"the {len(ssms)} of {layout.MODELS}", artifact.fix
        )
    return [(ssm, ranks) for ssm, ranks in zip(ssms, plan.ssm_ranks, strict=True) if ssm.name in ladder.sources]


def ssm_pages(options: ServeOptions, ranks: Sequence[int], context: int) -> int:
    """KV pages of an SSM on each of its ranks: their share of the requests, and room for the longest one."""
    if len(ranks) == 1:
        return options.pages
    return min(options.pages, max(ceil_div(options.pages, len(ranks)), 2 * (pages_of(context) + 1)))


def check_room(artifact: OpenedArtifact, ladder: DraftLadder, options: ServeOptions, ranks: Sequence[int] = ()) -> None:
    """Raise CapacityError when what this host will run does not fit into its memory, if it is kept there.

    ``ranks``: those of the plan that run on this host; none if the whole model does.
    """
    if not backend_of(options.device).in_host_memory:
        return
    context, _ = context_tokens(artifact, ladder, options)
    stage_ranks = {rank for stage in artifact.plan.stages for rank in stage.ranks}
    pools = [ModelPool(layout.rank_name(rank), options.pages) for rank in ranks if rank in stage_ranks]
    pools += [ModelPool(LLM, options.pages)] if not ranks else []
    for part, ssm_ranks in ssms_of(artifact, ladder):
        pages = ssm_pages(options, ssm_ranks, context) if ranks else options.pages
        pools += [ModelPool(part.name, pages)] * (sum(rank in ranks for rank in ssm_ranks) if ranks else 1)
    check_memory(artifact, pools, options.room.max_rows, options.max_requests)

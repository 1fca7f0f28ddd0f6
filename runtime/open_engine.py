"""From an opened artifact to a running engine: executors, drafters, tokenizer, measured step costs.

Owns the assembly; each part is its own file. The CPU path imports no torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from flexspec.compiler.artifact import Artifact, open_artifact
from flexspec.compiler.kv_slots import STEP_ROWS, longest_request, pages_of, request_slots
from flexspec.compiler.model_record import LLM, ModelRecord, PartRecord, record_from_json
from flexspec.compiler.plan import Plan, plan_from_json
from flexspec.compiler.rank_record import folder_of
from flexspec.errors import ArtifactError, CapacityError, ToolchainError
from flexspec.kernels.cpu_build import supported_isas
from flexspec.kernels.cpu_check import seeded_digest
from flexspec.runtime.chat import ChatRenderer
from flexspec.runtime.cpu_executor import CpuExecutor
from flexspec.runtime.drafters.base import DraftsElsewhere
from flexspec.runtime.drafters.budget import StepCost
from flexspec.runtime.drafters.plan import DraftLadder
from flexspec.runtime.drafters.planned import PlannedDrafter
from flexspec.runtime.engine import Engine
from flexspec.runtime.host_memory import Pool, check_memory
from flexspec.runtime.observer import Observer
from flexspec.runtime.open_drafters import DEFAULT_DRAFT, cheap_drafters, choose_ladder, ssm_drafter
from flexspec.runtime.pages import RowGroup, pack_rows
from flexspec.runtime.scheduler import Limits
from flexspec.runtime.step import Executor, OverlappingExecutor
from flexspec.runtime.tokenizer import Detokenizer, Tokenizer
from flexspec.types import PAGE_TOKENS

if TYPE_CHECKING:
    from flexspec.runtime.triton_open import GpuModels

CHAT_FILE = "chat_template.jinja"
_REBUILD = "compile the model again"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How an artifact is run. ``draft`` "auto" takes the artifact's plan; ``threads`` 0 is one a core, at most 8.

    ``device``: cpu, cuda (also AMD GPUs, by torch's name), or interpret (GPU kernels in Triton's interpreter).
    """

    draft: str = DEFAULT_DRAFT
    device: str = "cpu"
    threads: int = 0
    kv_tokens: int = 16_384
    max_requests: int = 16
    max_rows: int = STEP_ROWS
    context_tokens: int = 0  # 0 = as long as the model and the pool allow
    measure: bool = True  # time a few steps at start, so that the tree budget knows its costs
    checks: bool = True  # all digests and the self-test

    @property
    def pages(self) -> int:
        """KV pages of each model's pool."""
        return pages_of(self.kv_tokens)


@dataclass(slots=True)
class Served:
    """An engine with what its callers need beside it. ``isa``: instruction set or GPU architecture of its kernels."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    chat: ChatRenderer | None
    plan: Plan
    draft: DraftLadder
    isa: str
    context_tokens: int
    executors: list[Executor]

    def close(self) -> None:
        for executor in self.executors:
            executor.close()


OpenLlm = Callable[[Artifact, PartRecord, ServeOptions], Executor]


def open_engine(
    path: Path, options: ServeOptions, observer: Observer | None = None, open_llm: OpenLlm | None = None
) -> Served:
    """Open ``path`` and assemble its engine. ``open_llm`` makes the LLM's executor where it runs on several ranks.

    Raises ArtifactError, CapacityError, RequestError for a bad draft plan, ToolchainError for a device that is missing.
    """
    artifact = open_artifact(path, check_digests=options.checks)
    record = record_from_json(artifact.read_json("model.json"))
    plan = plan_from_json(artifact.read_json("plan.json"))
    ladder = choose_ladder(options.draft, plan, artifact, record)
    isa, executor_of = open_backend(artifact, record, ladder, options)
    context, longer_context = context_tokens(record, ladder, options)
    check_room(artifact, record, plan, ladder, options, ranks_here() if open_llm else ())
    tokenizer = Tokenizer(artifact.read_bytes("tokenizer.json"), record.eos_ids, record.bos_id)
    chat = _chat(artifact, record)
    with ExitStack() as opened:
        executors: list[Executor] = []

        def opens(part: PartRecord, given: OpenLlm | None = None, pages: int = 0) -> Executor:
            sized = replace(options, kv_tokens=pages * PAGE_TOKENS) if pages else options
            executors.append(given(artifact, part, options) if given else executor_of(part, sized))
            opened.callback(executors[-1].close)
            return executors[-1]

        llm = opens(record.models[0], open_llm)
        drafters = cheap_drafters(artifact, ladder, llm.vocab_size)
        for part, ranks in ssms_of(record, plan, ladder):
            elsewhere = llm if isinstance(llm, DraftsElsewhere) and ranks != (0,) else None
            own = None
            if elsewhere is None or 0 in ranks:
                pages = ssm_pages(options, ranks, context) if elsewhere else options.pages
                own = ssm_drafter(part, opens(part, pages=pages), ladder, llm.vocab_size)
            drafter = elsewhere.drafter(part, ranks, own) if elsewhere else own
            assert drafter is not None
            drafters.append(drafter)
        planned = PlannedDrafter(ladder, drafters)
        limits = Limits(context, max_running=options.max_requests, longer_context=longer_context)
        count = plan.micro_batches_for if isinstance(llm, OverlappingExecutor) else _one
        engine = Engine(llm, planned, lambda: Detokenizer(tokenizer), record.eos_ids, limits, observer, count)
        if options.measure and ladder.drafts and options.device != "interpret":
            planned.step_cost, engine.plain_step_s = measure_steps(llm, planned.limits.max_nodes)
        opened.pop_all()
    return Served(record.name, engine, tokenizer, chat, plan, ladder, isa, context, executors)


def _one(requests: int) -> int:
    """Micro-batches of one rank: two steps would only take turns."""
    return 1


def ssms_of(record: ModelRecord, plan: Plan, ladder: DraftLadder) -> list[tuple[PartRecord, tuple[int, ...]]]:
    """The SSMs that the ladder drafts with, and the ranks where each lives."""
    ssms = [part for part in record.models if part.name != LLM]
    if len(ssms) != len(plan.ssm_ranks):
        raise ArtifactError(f"a plan for {len(plan.ssm_ranks)} SSMs", f"the {len(ssms)} of model.json", _REBUILD)
    return [each for each in zip(ssms, plan.ssm_ranks, strict=True) if each[0].name in ladder.sources]


def ssm_pages(options: ServeOptions, ranks: Sequence[int], context: int) -> int:
    """KV pages of an SSM on each of its ranks: their share of the requests, and room for the longest one."""
    if len(ranks) == 1:
        return options.pages
    return min(options.pages, max(-(-options.pages // len(ranks)), 2 * (pages_of(context) + 1)))


def check_room(
    artifact: Artifact,
    record: ModelRecord,
    plan: Plan,
    ladder: DraftLadder,
    options: ServeOptions,
    ranks: Sequence[int] = (),
) -> None:
    """Raise CapacityError when what this host will run does not fit into its memory (CPU only).

    ``ranks``: those of the plan that run here; none where the whole model does.
    """
    if options.device != "cpu":
        return
    context, _ = context_tokens(record, ladder, options)
    held = {rank for stage in plan.stages for rank in stage.ranks}
    pools = [Pool(folder_of(rank), options.pages) for rank in ranks if rank in held]
    pools += [Pool(LLM, options.pages)] if not ranks else []
    for part, living in ssms_of(record, plan, ladder):
        pages = ssm_pages(options, living, context) if ranks else options.pages
        pools += [Pool(part.name, pages)] * (sum(rank in ranks for rank in living) if ranks else 1)
    check_memory(artifact, pools, max(options.max_rows, options.max_requests), options.max_requests)


def ranks_here() -> range:
    """The ranks that torchrun has put on this host."""
    import os

    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def open_backend(
    artifact: Artifact, record: ModelRecord, ladder: DraftLadder, options: ServeOptions
) -> tuple[str, Callable[[PartRecord, ServeOptions], Executor]]:
    """What the kernels run on, and the maker of a model's executor there."""
    if options.device == "cpu":
        isa = choose_isa(artifact)
        return isa, lambda part, sized: open_cpu(artifact, isa, part, sized)
    gpu = gpu_models(artifact, record, ladder, options)
    return gpu.name, lambda part, sized: gpu.executor(part, sized.pages, max(sized.max_rows, sized.max_requests))


def gpu_models(artifact: Artifact, record: ModelRecord, ladder: DraftLadder, options: ServeOptions) -> GpuModels:
    """The artifact on a GPU. Raises as triton_open.py: open_gpu, and ToolchainError without PyTorch."""
    try:
        from flexspec.runtime.triton_open import open_gpu
    except ImportError as error:
        raise ToolchainError(
            f"--device {options.device} without PyTorch ({error})", "torch >= 2.11",
            "pip install torch, or run it with --device cpu",
        ) from None  # fmt: skip
    worst = ladder.worst
    return open_gpu(artifact, record, options.device, max(worst.max_nodes + 1, worst.ssm_rows))


def choose_isa(artifact: Artifact) -> str:
    """The best instruction set that both the artifact and this CPU have."""
    here = supported_isas()
    for isa in here:
        if f"cpu-{isa}" in artifact.manifest.targets:
            return isa
    artifact.require_target(f"cpu-{here[0]}")
    raise AssertionError("require_target raises for a target that is not there")


def context_tokens(record: ModelRecord, ladder: DraftLadder, options: ServeOptions) -> tuple[int, str]:
    """Longest prompt plus output of one request, and how a longer one can be had ("" if it is the model's own).

    The least of the model's, the pool's with one tree behind it, and the option's.
    """
    nodes = ladder.worst.max_nodes
    room = longest_request(options.pages, nodes)
    if room < 2:
        raise CapacityError(
            f"a KV pool of {options.kv_tokens} tokens",
            f"at least {request_slots(2, nodes)} for trees of {nodes + 1} nodes",
            "raise --kv-tokens, or choose a smaller --draft",
        )
    model = record.models[0].max_positions
    longest, why = (room, "raise --kv-tokens") if room < model else (model, "")
    asked = options.context_tokens
    if not asked or asked == longest:
        return longest, why
    if not 2 <= asked < longest:
        holds = f"what {options.kv_tokens} KV tokens hold beside a tree" if why else "the model's own"
        raise CapacityError(
            f"--context {asked} (tokens of a prompt and its output together)",
            f"2 to {longest}, {holds}",
            "choose --context in that range" + (f", or {why}" if why else ""),
        )
    return asked, "raise --context"


def _chat(artifact: Artifact, record: ModelRecord) -> ChatRenderer | None:
    if CHAT_FILE not in artifact.names():
        return None
    try:
        template = artifact.read_bytes(CHAT_FILE).decode()
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{CHAT_FILE} is not UTF-8 ({error})", "a text", "compile the model again") from None
    return ChatRenderer(template, record.special_tokens)


def open_cpu(artifact: Artifact, isa: str, part: PartRecord, options: ServeOptions) -> CpuExecutor:
    library = artifact.file(f"kernels/cpu/{part.name}/{isa}.so")
    weights = _weights(artifact, part)
    if options.checks:
        _self_test(artifact, isa, part.name, library, weights)
    executor = CpuExecutor(
        library,
        weights,
        pages=options.pages,
        max_rows=max(options.max_rows, options.max_requests),  # every request needs one
        threads=options.threads or default_threads(),
    )
    facts = executor.facts
    found = (facts.outputs, facts.id_rows, facts.feature_columns, facts.reads_features)
    recorded = (part.outputs, part.vocab_size, part.feature_columns, part.reads_features)
    if found != recorded or part.max_positions > facts.max_positions:
        executor.close()
        raise ArtifactError(f"model.json tells other sizes of {part.name} than its program", f"{facts}", _REBUILD)
    return executor


def _weights(artifact: Artifact, part: PartRecord) -> list[NDArray[Any]]:
    """The arrays of the program's weight table; a model may use another one's file."""
    files = {file: artifact.tensors(file) for file in dict.fromkeys(file for file, _ in part.weights)}
    missing = [tensor for file, tensor in part.weights if tensor not in files[file]]
    if missing:
        raise ArtifactError(f"no tensor {missing[0]} for {part.name}", "every weight of its program", _REBUILD)
    return [files[file][tensor] for file, tensor in part.weights]


def default_threads() -> int:
    """One thread a core this process may run on, at most 8: a step is bound by memory, not by arithmetic.

    Ranks on one host share its cores.
    """
    import os

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))


def _self_test(artifact: Artifact, isa: str, name: str, library: Path, weights: Sequence[NDArray[Any]]) -> None:
    try:
        expected = artifact.read_json("checks.json").get(name, {}).get(isa)
    except AttributeError:
        raise ArtifactError("checks.json holds no table of digests", "one for each model", _REBUILD) from None
    if expected is None:  # compiled on a machine that could not run this instruction set
        return
    found = seeded_digest(library, weights)
    if found != expected:
        raise ArtifactError(
            f"{name} on {isa} computes other logits ({found[:12]}) than at compile time ({expected!s:.12})",
            "the same bytes",
            f"rebuild it: {artifact.manifest.rebuild}; if it persists set FLEXSPEC_CPU_ISA=avx512 or avx2",
        )


def measure_steps(executor: Executor, max_nodes: int, repeats: int = 3) -> tuple[StepCost, float]:
    """Time LLM steps of 1 row and of trees up to ``max_nodes`` at a short context; medians, in relative costs.

    Returns the cost table and the seconds of a one-row step. Uses the pool's first pages before any request owns them.
    """
    sizes = sorted({1, *(n for n in (4, 8, 12, 16, 24, 32, 48, 64) if n <= max_nodes + 1), max_nodes + 1})
    sizes = [n for n in sizes if n <= executor.max_rows]
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for _ in range(repeats):
        for n in sizes:  # interleaved, so that a slow moment of the machine hits all sizes alike
            bits = [1 | 1 << i for i in range(n)] if n > 1 else None
            pages = list(range(min(executor.pages, 1 + (n + PAGE_TOKENS) // PAGE_TOKENS)))
            group = RowGroup([1] * n, [1] * n if n > 1 else [0], 0, pages, range(n), bits)
            batch = pack_rows([group])
            began = time.perf_counter()
            executor.step(batch, want_logits=False)
            times[n].append(time.perf_counter() - began)
    medians = [(n, statistics.median(values)) for n, values in times.items()]
    return StepCost.from_points(medians), medians[0][1]

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact import Artifact, open_artifact
from flexspec.compiler.model_record import LLM, ModelRecord, PartRecord, record_from_json
from flexspec.compiler.ngram_table import check_table, check_vocabulary
from flexspec.compiler.plan import Plan, plan_from_json
from flexspec.errors import ArtifactError, CapacityError, RequestError, ToolchainError
from flexspec.kernels.cpu_build import supported_isas
from flexspec.kernels.cpu_check import seeded_digest
from flexspec.runtime.chat import ChatRenderer
from flexspec.runtime.cpu_executor import CpuExecutor
from flexspec.runtime.drafters.base import Drafter
from flexspec.runtime.drafters.budget import StepCost
from flexspec.runtime.drafters.ngram import NgramDrafter, NgramModel
from flexspec.runtime.drafters.plan import DraftPlan, worst_case
from flexspec.runtime.drafters.planned import PlannedDrafter
from flexspec.runtime.drafters.ssm import SsmDrafter
from flexspec.runtime.drafters.suffix import SuffixDrafter
from flexspec.runtime.engine import Engine
from flexspec.runtime.observer import Observer
from flexspec.runtime.pages import RowGroup, pack_rows
from flexspec.runtime.scheduler import Limits
from flexspec.runtime.step import Executor
from flexspec.runtime.tokenizer import Detokenizer, Tokenizer
from flexspec.types import PAGE_TOKENS

DEFAULT_DRAFT = "auto"
NGRAM_FILE = "ngram.safetensors"
CHAT_FILE = "chat_template.jinja"
_REBUILD = "compile the model again"


def default_draft(ssms: int) -> str:
    """The draft plan that compile stores when none is given: every source in one budgeted tree."""
    names = ["suffix", "ngram", *("ssm" if i == 0 else f"ssm{i + 1}" for i in range(ssms))]
    return f"budget:24/depth=8/sources={'+'.join(names)}"


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
    max_rows: int = 256
    context_tokens: int = 0  # 0 = as long as the model and the pool allow
    measure: bool = True  # time a few steps at start, so that the tree budget knows its costs
    checks: bool = True  # all digests and the self-test

    @property
    def pages(self) -> int:
        """KV pages of each model's pool."""
        return -(-self.kv_tokens // PAGE_TOKENS)


@dataclass(slots=True)
class Served:
    """An engine with what its callers need beside it. ``isa``: instruction set or GPU architecture of its kernels."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    chat: ChatRenderer | None
    plan: Plan
    draft: DraftPlan
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
    draft = _choose_draft(options.draft, plan, _sources(artifact, record))
    isa, executor_of = _backend(artifact, record, draft, options)
    context, longer_context = _context(record, draft, options)
    tokenizer = Tokenizer(artifact.read_bytes("tokenizer.json"), record.eos_ids, record.bos_id)
    chat = _chat(artifact, record)
    with ExitStack() as opened:
        wanted = [part for part in record.models if part.name == LLM or part.name in draft.sources]
        executors: list[Executor] = []
        for part in wanted:
            open_part = open_llm if part.name == LLM else None
            executors.append(open_part(artifact, part, options) if open_part else executor_of(part))
            opened.callback(executors[-1].close)
        planned = PlannedDrafter(draft, _drafters(artifact, draft, wanted, executors))
        limits = Limits(context, max_running=options.max_requests, longer_context=longer_context)
        engine = Engine(executors[0], planned, lambda: Detokenizer(tokenizer), record.eos_ids, limits, observer)
        if options.measure and draft.method != "off" and options.device != "interpret":
            planned.step_cost, engine.plain_step_s = measure_steps(executors[0], planned.limits.max_nodes)
        opened.pop_all()
    return Served(record.name, engine, tokenizer, chat, plan, draft, isa, context, executors)


def _backend(
    artifact: Artifact, record: ModelRecord, draft: DraftPlan, options: ServeOptions
) -> tuple[str, Callable[[PartRecord], Executor]]:
    """What the kernels run on, and the maker of a model's executor there."""
    if options.device == "cpu":
        isa = choose_isa(artifact)
        return isa, lambda part: _executor(artifact, isa, part, options)
    try:
        from flexspec.runtime.triton_open import open_gpu
    except ImportError as error:
        raise ToolchainError(
            f"--device {options.device} without PyTorch ({error})", "torch >= 2.11",
            "pip install torch, or run it with --device cpu",
        ) from None  # fmt: skip
    worst = worst_case(draft)
    gpu = open_gpu(artifact, record, options.device, max(worst.max_nodes + 1, worst.ssm_rows))
    return gpu.name, lambda part: gpu.executor(part, options.pages, max(options.max_rows, options.max_requests))


def choose_isa(artifact: Artifact) -> str:
    """The best instruction set that both the artifact and this CPU have."""
    here = supported_isas()
    for isa in here:
        if f"cpu-{isa}" in artifact.manifest.targets:
            return isa
    artifact.require_target(f"cpu-{here[0]}")
    raise AssertionError("require_target raises for a target that is not there")


def _sources(artifact: Artifact, record: ModelRecord) -> tuple[str, ...]:
    """Names of all sources of drafts that the artifact has."""
    table = (NGRAM_FILE,) if NGRAM_FILE in artifact.names() else ()
    return ("suffix", *("ngram" for _ in table), *(part.name for part in record.models if part.name != LLM))


def _choose_draft(text: str, plan: Plan, sources: Sequence[str]) -> DraftPlan:
    """The draft plan asked for, with all ``sources`` unless it names its own; "auto" is the artifact's."""
    if text == DEFAULT_DRAFT:
        try:
            stored = DraftPlan.parse(plan.draft_for(1))
        except RequestError as error:
            raise ArtifactError(f"plan.json holds {error.found}", error.expected, "compile the model again") from None
        kept = tuple(source for source in stored.sources if source in sources)
        return replace(stored, sources=kept) if kept else DraftPlan(method="off")
    parsed = DraftPlan.parse(text)
    if parsed.method in ("chain", "budget") and "sources=" not in text:
        return replace(parsed, sources=tuple(sources))
    missing = [source for source in parsed.sources if source not in sources]
    if missing and parsed.method != "off":
        raise ArtifactError(
            f"the artifact holds no {', '.join(missing)} for --draft {text}",
            f"sources among {', '.join(sources)}",
            "compile it with --ssm DIR, or name other sources",
        )
    return parsed


def _context(record: ModelRecord, draft: DraftPlan, options: ServeOptions) -> tuple[int, str]:
    """Longest prompt plus output of one request, and how a longer one can be had ("" if it is the model's own).

    The least of the model's, the pool's with one tree behind it, and the option's.
    """
    tree = worst_case(draft).max_nodes + 1
    room = options.pages * PAGE_TOKENS - tree
    if room < 2:
        raise CapacityError(
            f"a KV pool of {options.kv_tokens} tokens",
            f"at least {tree + 2} for trees of {tree} nodes",
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


def _executor(artifact: Artifact, isa: str, part: PartRecord, options: ServeOptions) -> CpuExecutor:
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
    """One thread a core this process may run on, at most 8: a step is bound by memory, not by arithmetic."""
    import os

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores))


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


def _drafters(
    artifact: Artifact, draft: DraftPlan, models: Sequence[PartRecord], executors: Sequence[Executor]
) -> list[Drafter]:
    """The drafters of the plan's sources; ``models`` and ``executors`` are the LLM's first."""
    if draft.method == "off":
        return []
    vocab_size = executors[0].vocab_size
    made: list[Drafter] = [SuffixDrafter()]
    if "ngram" in draft.sources:
        table = artifact.tensors(NGRAM_FILE)
        check_table(table, NGRAM_FILE)
        check_vocabulary(table, vocab_size, NGRAM_FILE)
        made.append(NgramDrafter(NgramModel(table)))
    for part, executor in zip(models[1:], executors[1:], strict=True):
        if part.vocab_size != vocab_size:
            raise ArtifactError(f"{part.name} has {part.vocab_size} tokens", f"the LLM's {vocab_size}", _REBUILD)
        made.append(
            SsmDrafter(
                executor,
                draft.expansion,
                vocab_size,
                keep_ids=None if part.keep_ids is None else np.array(part.keep_ids, np.int64),
                reads_features=bool(part.reads_features),
                sampled=draft.sampled,
                name=part.name,
            )
        )
    return made


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

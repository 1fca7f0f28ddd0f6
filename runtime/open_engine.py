"""From an opened artifact to a running engine: executors, drafters, tokenizer, measured step costs.

Owns the assembly; each part is its own file. The CPU path imports no torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flexspec.compiler.artifact import Artifact, open_artifact
from flexspec.compiler.ngram_table import check_table
from flexspec.compiler.plan import Plan, plan_from_json
from flexspec.errors import ArtifactError
from flexspec.kernels.cpu_build import supported_isas
from flexspec.kernels.cpu_check import seeded_digest
from flexspec.runtime.chat import ChatRenderer
from flexspec.runtime.cpu_executor import CpuExecutor, ProgramShape
from flexspec.runtime.drafters.base import Drafter
from flexspec.runtime.drafters.budget import StepCost
from flexspec.runtime.drafters.ngram import NgramDrafter, NgramModel
from flexspec.runtime.drafters.plan import DraftPlan
from flexspec.runtime.drafters.planned import PlannedDrafter
from flexspec.runtime.drafters.ssm import SsmDrafter
from flexspec.runtime.drafters.suffix import SuffixDrafter
from flexspec.runtime.engine import Engine, Observer
from flexspec.runtime.pages import RowGroup, pack_rows
from flexspec.runtime.scheduler import Limits
from flexspec.runtime.step import PAGE_TOKENS, Executor
from flexspec.runtime.tokenizer import Detokenizer, Tokenizer

DEFAULT_DRAFT = "auto"


def default_draft(ssms: int) -> str:
    """The draft plan that compile stores when none is given: every source in one budgeted tree."""
    names = ["suffix", "ngram", *("ssm" if i == 0 else f"ssm{i + 1}" for i in range(ssms))]
    return f"budget:24/depth=8/sources={'+'.join(names)}"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How an artifact is run. ``draft`` "auto" takes the artifact's plan; ``threads`` 0 is one a core, at most 8."""

    draft: str = DEFAULT_DRAFT
    threads: int = 0
    kv_tokens: int = 16_384
    max_requests: int = 16
    max_rows: int = 256
    context_tokens: int = 0  # 0 = as long as the model and the pool allow
    measure: bool = True  # time a few steps at start, so that the tree budget knows its costs
    verify: bool = True  # check all digests and run the self-test


@dataclass(slots=True)
class Served:
    """An engine with what its callers need beside it."""

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


def open_engine(path: Path, options: ServeOptions, observer: Observer | None = None) -> Served:
    """Open ``path`` and assemble its engine. Raises ArtifactError, CapacityError, RequestError for a bad draft plan."""
    artifact = open_artifact(path, verify=options.verify)
    record = artifact.read_json("model.json")
    plan = plan_from_json(artifact.read_json("plan.json"))
    isa = _choose_isa(artifact)
    names = [model["name"] for model in record["models"]]
    draft = _draft_plan(options.draft, plan, names, "ngram.safetensors" in artifact.names())
    tensors = {f"weights/{name}.safetensors": artifact.tensors(f"weights/{name}.safetensors") for name in names}
    wanted = [m for m in record["models"] if m["name"] == "llm" or m["name"] in draft.sources]
    executors: list[Executor] = [_executor(artifact, isa, model, tensors, options) for model in wanted]
    llm = executors[0]
    tokenizer = Tokenizer(artifact.read_bytes("tokenizer.json"), record["eos_ids"], record["bos_id"])
    planned = PlannedDrafter(draft, _drafters(artifact, draft, wanted, executors))
    context = min(record["models"][0]["max_positions"], llm.pages * PAGE_TOKENS - planned.limits.max_nodes - 1)
    context = min(context, options.context_tokens or context)
    limits = Limits(context, max_running=options.max_requests)
    engine = Engine(llm, planned, lambda: Detokenizer(tokenizer), record["eos_ids"], limits, observer)
    if options.measure and draft.method != "off":
        planned.step_cost, engine.plain_step_s = measure_steps(llm, draft.max_nodes)
    chat = None
    if "chat_template.jinja" in artifact.names():
        template = artifact.read_bytes("chat_template.jinja").decode()
        chat = ChatRenderer(template, record["special_tokens"])
    return Served(record["name"], engine, tokenizer, chat, plan, draft, isa, context, executors)


def _choose_isa(artifact: Artifact) -> str:
    """The best instruction set that both the artifact and this CPU have."""
    here = supported_isas()
    for isa in here:
        if f"cpu-{isa}" in artifact.manifest.targets:
            return isa
    artifact.require_target(f"cpu-{here[0]}")
    raise AssertionError("require_target raises for a target that is not there")


def _draft_plan(text: str, plan: Plan, models: Sequence[str], has_table: bool) -> DraftPlan:
    """The draft plan asked for; "auto" is the artifact's, with every source it holds."""
    if text != DEFAULT_DRAFT:
        parsed = DraftPlan.parse(text)
        missing = [s for s in parsed.sources if s.startswith("ssm") and s not in models]
        missing += [s for s in parsed.sources if s == "ngram" and not has_table]
        if missing and parsed.method != "off":
            raise ArtifactError(
                f"the artifact holds no {', '.join(missing)}",
                f"sources among {', '.join(_sources(models, has_table))}",
                "compile it with --ssm DIR, or name other sources",
            )
        return parsed
    parsed = DraftPlan.parse(plan.draft_for(1))
    kept = tuple(s for s in parsed.sources if s in _sources(models, has_table))
    return replace(parsed, sources=kept) if parsed.method != "off" else parsed


def _sources(models: Sequence[str], has_table: bool) -> tuple[str, ...]:
    return ("suffix", *(("ngram",) if has_table else ()), *(m for m in models if m != "llm"))


def _executor(
    artifact: Artifact, isa: str, model: dict[str, Any], tensors: dict[str, Any], options: ServeOptions
) -> CpuExecutor:
    library = artifact.file(f"kernels/cpu/{model['name']}/{isa}.so")
    weights = [tensors[file][name] for file, name in model["weights"]]
    if options.verify:
        _self_test(artifact, isa, model, library, weights)
    shape = ProgramShape(model["outputs"], model["max_positions"], model["feature_columns"], model["reads_features"])
    return CpuExecutor(
        library,
        weights,
        shape,
        pages=-(-options.kv_tokens // PAGE_TOKENS),
        max_rows=options.max_rows,
        threads=options.threads or default_threads(),
    )


def default_threads() -> int:
    """One thread a core this process may run on, at most 8: a step is bound by memory, not by arithmetic."""
    import os

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores))


def _self_test(artifact: Artifact, isa: str, model: dict[str, Any], library: Path, weights: list[Any]) -> None:
    expected = artifact.read_json("checks.json").get(model["name"], {}).get(isa)
    if expected is None:  # compiled on a machine that could not run this instruction set
        return
    found = seeded_digest(
        library,
        weights,
        ids_below=model["vocab_size"],
        outputs=model["outputs"],
        features=model["reads_features"],
    )
    if found != expected:
        raise ArtifactError(
            f"{model['name']} on {isa} computes other logits ({found[:12]}) than at compile time ({expected[:12]})",
            "the same bytes",
            f"rebuild it: {artifact.manifest.rebuild}; if it persists set FLEXSPEC_CPU_ISA=avx512 or avx2",
        )


def _drafters(
    artifact: Artifact, draft: DraftPlan, models: Sequence[dict[str, Any]], executors: Sequence[Executor]
) -> list[Drafter]:
    if draft.method == "off":
        return []
    made: list[Drafter] = [SuffixDrafter()]
    if "ngram" in draft.sources:
        table = artifact.tensors("ngram.safetensors")
        check_table(table, "ngram.safetensors")
        made.append(NgramDrafter(NgramModel(table)))
    for model, executor in zip(models[1:], executors[1:], strict=True):
        keep = None if model["keep_ids"] is None else np.array(model["keep_ids"], np.int64)
        made.append(
            SsmDrafter(
                executor,
                draft.expansion,
                models[0]["vocab_size"],
                keep_ids=keep,
                reads_features=bool(model["reads_features"]),
                sampled=draft.sampled,
                name=model["name"],
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

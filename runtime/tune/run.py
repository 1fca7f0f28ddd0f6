"""``flexspec tune`` end to end: generate, train, measure, export. Each phase saves its work and resumes after a kill.

Work folders are named by the hash of what decides their content: ``data-HASH`` (shards) and ``train-HASH``
(checkpoint), so a changed setting never reads stale files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from flexspec.arithmetic import ceil_div
from flexspec.compiler.artifact.ngram_table import build_table
from flexspec.compiler.frontends.open_model import LoadedModel, open_model
from flexspec.ops.rope import rope_tables
from flexspec.progress import Progress
from flexspec.runtime.executors.step import Executor
from flexspec.runtime.tune.config import TuneConfig
from flexspec.runtime.tune.corpus import Conversation, frequent_tokens, read_corpus, sequences, shard_exists, split
from flexspec.runtime.tune.evaluate import HitRates, hit_rates
from flexspec.runtime.tune.export import TuneResult, export
from flexspec.runtime.tune.generate import Generator
from flexspec.runtime.tune.host import keep_large_blocks
from flexspec.runtime.tune.llm import open_executor, open_tokenizer
from flexspec.runtime.tune.model import FusedStateNet, Weights, initial_weights, ssm_config
from flexspec.runtime.tune.train import Teacher, Trainer, id_tensor, prepare_torch
from flexspec.types import PAGE_TOKENS

Log = Callable[[str], None]
OpenExecutor = Callable[[LoadedModel, TuneConfig], Executor]
_LOG_SECONDS = 60.0
_MAX_ROWS = 256


def open_llm(model: LoadedModel, config: TuneConfig) -> Executor:
    """The LLM's CPU program with a KV pool for the whole batch at half the longest conversation's length."""
    g = config.generate
    pages = ceil_div(g.max_prompt_tokens + g.max_answer_tokens, PAGE_TOKENS)
    return open_executor(
        model, config.tap_layers, pages=pages * (2 + g.batch // 2), max_rows=max(_MAX_ROWS, g.batch),
        threads=config.train.threads,
    )  # fmt: skip


def tune(
    model_path: Path, out: Path, work: Path, config: TuneConfig, progress: Progress, log: Log, command: str,
    open_llm: OpenExecutor = open_llm,
) -> TuneResult:  # fmt: skip
    """Create the SSM folder ``out`` for the LLM at ``model_path``. Raises TuneError and what loading it raises."""
    keep_large_blocks()
    model = open_model(model_path)
    config.check(model.config.layers, model.config.vocab_size)
    data = work / f"data-{config.generate_key(model.source_hash)}"
    checkpoints = work / f"train-{config.train_key(model.source_hash)}"
    log(f"work folders {data} and {checkpoints.name}")
    generate(model, config, data, open_llm, progress, log)
    corpus = read_corpus(data, config.generate.shards)
    train, held_out = split(corpus, config.held_out_every)
    keep_ids = frequent_tokens(train, model.config.vocab_size, config.reduced_vocab_size)
    prepare_torch(config.train.threads)
    net, teacher, start = open_training(model, config, id_tensor(keep_ids))
    trainer = Trainer(net, start, teacher, train, config.train, checkpoints)
    weights = trainer.run(_reporter("training", progress, log))
    keep_ids = keep_ids[: config.exported_vocab_size]  # frequent_tokens sorts them by frequency
    teacher = Teacher(teacher.embedding_VE, teacher.head_VE, id_tensor(keep_ids))
    result = TuneResult(
        len(corpus), sum(len(c.answer) for c in corpus), sum(c.prompt_tokens for c in corpus), trainer.steps,
        trainer.trained_tokens, *measure(net, weights, teacher, held_out, config),
    )  # fmt: skip
    log(f"greedy hit rates (top-1, 2, 4, 8) by depth: {result.greedy.hits}")
    table = build_table(sequences(train), config.ngram_order, config.ngram_bytes)
    export(out, model, config, weights, keep_ids, table, result, command)
    return result


def generate(
    model: LoadedModel, config: TuneConfig, folder: Path, open_llm: OpenExecutor, progress: Progress, log: Log
) -> None:
    """Generate the missing shards of ``folder``; does nothing, and builds no program, if there are none."""
    if all(shard_exists(folder, shard) for shard in range(config.generate.shards)):
        return
    tokenizer, frame = open_tokenizer(model)
    executor = open_llm(model, config)
    try:
        width = (len(config.tap_layers) + 1) * model.config.hidden_size
        generator = Generator(
            executor, tokenizer, frame, model.config.eos_ids, config.generate, folder, config.held_out_every, width
        )
        generator.run(_reporter("inventing and answering", progress, log))
    finally:
        executor.close()


def open_training(
    model: LoadedModel, config: TuneConfig, keep_ids: torch.Tensor
) -> tuple[FusedStateNet, Teacher, Weights]:
    """The network, the LLM's matrices it learns from, and the initial weights."""
    llm, taps = model.config, len(config.tap_layers) + 1
    embedding = torch.from_numpy(model.weights.get("embed_tokens.weight")).to(torch.bfloat16)
    head = embedding
    if not llm.tied_embeddings:
        head = torch.from_numpy(model.weights.get("lm_head.weight")).to(torch.bfloat16)
    positions = config.train.max_tokens + 8
    cos, sin = rope_tables(asdict(llm.rope), llm.head_dim, positions)
    net = FusedStateNet(ssm_config(llm), taps, (torch.from_numpy(cos), torch.from_numpy(sin)))
    start = initial_weights(ssm_config(llm), taps, model.weights, llm.layers, config.train)
    return net, Teacher(embedding, head, keep_ids), start


def measure(
    net: FusedStateNet, weights: Weights, teacher: Teacher, held_out: Sequence[Conversation], config: TuneConfig
) -> tuple[HitRates, HitRates]:
    """Hit rates on held-out greedy and sampled answers."""
    greedy = [c for c in held_out if c.temperature == 0.0]
    sampled = [c for c in held_out if c.temperature > 0.0]
    first, second = (
        hit_rates(net, weights, teacher, part, max_tokens=config.train.max_tokens) for part in (greedy, sampled)
    )
    return first, second


def _reporter(phase: str, progress: Progress, log: Log) -> Callable[[int, int, str], None]:
    """Progress on every call and one log line per minute, with the rate."""
    started = last = time.monotonic()
    first: int | None = None

    def report(done: int, total: int, detail: str) -> None:
        nonlocal last, first
        progress(phase, done, total)
        now = time.monotonic()
        first = done if first is None else first
        if now - last >= _LOG_SECONDS or done == total:
            last = now
            left_s = (total - done) * (now - started) / max(1, done - first)
            log(f"{phase}: {done}/{total}, {detail}, {(now - started) / 60:.1f} min, about {left_s / 60:.0f} min left")

    return report

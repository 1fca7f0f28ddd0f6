"""The output folder of a tune run: weights in bfloat16, config.json, n-gram table, settings and model card.

The embedding and the LM head are not in it: both are rows of the LLM's own matrices, chosen by ``keep_ids``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.ngram_table import Arrays, save_table
from flexspec.compiler.frontends.loaded_model import LoadedModel
from flexspec.errors import TuneError
from flexspec.host.files import new_folder, put_in_place, sync
from flexspec.ops.rope import RopeConfig
from flexspec.runtime.tune.config import TuneConfig
from flexspec.runtime.tune.evaluate import TOP, HitRates
from flexspec.runtime.tune.model import Weights, ssm_config

MAX_BYTES = 24_000_000  # of the whole folder: small enough to live in a source repository
_NGRAM_TABLE = layout.drafter_table("ngram")


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The results of a run, for the card: counts of the data and of training, and hit rates on held-out answers."""

    conversations: int
    answer_tokens: int
    prompt_tokens: int
    steps: int
    trained_tokens: int
    greedy: HitRates
    sampled: HitRates


def config_json(model: LoadedModel, config: TuneConfig) -> dict[str, Any]:
    """config.json under Hugging Face's field names, with the SSM's own three keys and the LLM it belongs to."""
    c = ssm_config(model.config)
    return {
        "architectures": ["FusedStateSSM"], "model_type": "fused_state_ssm", "torch_dtype": "bfloat16",
        "hidden_act": "silu", "hidden_size": c.hidden_size, "intermediate_size": c.ffn_size,
        "num_hidden_layers": c.layers, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim, "rms_norm_eps": c.norm_eps, "max_position_embeddings": c.max_positions,
        "vocab_size": c.vocab_size, "tie_word_embeddings": False, "bos_token_id": c.bos_id,
        "eos_token_id": list(c.eos_ids), "rope_parameters": _rope_json(c.rope),
        "reduced_vocab_size": config.exported_vocab_size, "tap_layers": list(config.tap_layers),
        "llm": {"name": model.name, "source_hash": model.source_hash},
    }  # fmt: skip


def _rope_json(rope: RopeConfig) -> dict[str, Any]:
    table: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        table["factor"] = rope.factor
    if rope.kind == "llama3":
        table |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        table |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor:
            table["attention_factor"] = rope.attention_factor
    if rope.kind in ("llama3", "yarn"):
        table["original_max_position_embeddings"] = rope.original_max_positions
    return table


def export(
    out: Path, model: LoadedModel, config: TuneConfig, weights: Weights, keep_ids: np.ndarray[Any, Any], table: Arrays,
    result: TuneResult, command: str,
) -> None:  # fmt: skip
    """Write the folder ``out`` in one move; an older one is replaced. Raises TuneError if it would be too big."""
    with new_folder(out) as partial:
        _fill(partial, model, config, weights, keep_ids, table, result, command)
        put_in_place(partial, out)


def _fill(
    partial: Path, model: LoadedModel, config: TuneConfig, weights: Weights, keep_ids: np.ndarray[Any, Any],
    table: Arrays, result: TuneResult, command: str,
) -> None:  # fmt: skip
    tensors = {name: weights[name].detach().to(torch.bfloat16).contiguous() for name in sorted(weights)}
    tensors["keep_ids"] = torch.from_numpy(keep_ids.astype(np.int32))
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner can read
    save_table(table, partial / _NGRAM_TABLE)
    _write_json(partial / "config.json", config_json(model, config))
    _write_json(
        partial / "tune.json",
        {"llm": {"name": model.name, "source_hash": model.source_hash}, "settings": asdict(config),
         "result": asdict(result), "command": command},
    )  # fmt: skip
    parameters = sum(t.numel() for name, t in tensors.items() if name != "keep_ids")
    (partial / "README.md").write_text(model_card(model, config, result, parameters, command), encoding="utf-8")
    size = sum(path.stat().st_size for path in partial.iterdir())
    if size > MAX_BYTES:
        raise TuneError(
            f"a result of {size} bytes", f"at most {MAX_BYTES}", "lower --ngram-bytes, or tune a narrower model"
        )
    for path in partial.iterdir():
        with path.open("rb") as file:
            sync(file)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _table(rates: HitRates) -> str:
    rows = ["| depth | " + " | ".join(f"top-{k}" for k in TOP) + " |", "|---" * (len(TOP) + 1) + "|"]
    rows += [f"| {d} | " + " | ".join(f"{hit:.3f}" for hit in hits) + " |" for d, hits in enumerate(rates.hits, 1)]
    return "\n".join(rows)


def model_card(model: LoadedModel, config: TuneConfig, result: TuneResult, parameters: int, command: str) -> str:
    """README.md of the folder."""
    g, t = config.generate, config.train
    taps = ", ".join(str(tap) for tap in config.tap_layers)
    return f"""---
license: apache-2.0
tags: [speculative-decoding, ssm, flexspec]
---
# SSM for {model.name}

A small speculative model (SSM) that drafts tokens for **{model.name}** in flexspec.
It changes how fast the LLM's text comes, never the text. It is of no use without that LLM: its embedding and LM head
are rows of the LLM's own matrices.

Made by `{command}`. The same command makes an equal SSM again, byte for byte where flexspec's CPU code generator, the
instruction set and torch are of the same version.

- Form: one Llama layer over `fc_embed(norm(embedding)) + fc_feature(norm(feature))`, {parameters / 1e6:.1f} M
  parameters in bfloat16. The feature at depth 1 is the LLM's fused hidden states (after layers {taps} and the last);
  deeper drafts read the SSM's own output state (the EAGLE-3 idea, arXiv 2503.01840).
- Output: {config.exported_vocab_size} tokens (`keep_ids`), the most frequent of the {config.reduced_vocab_size} that
  it was trained on.
- `{_NGRAM_TABLE}`: a back-off {config.ngram_order}-gram table of the same answers, a drafter
  without a model step.
- LLM: sha256 of its file `{model.source_hash}`.
- Licence: Apache-2.0, as flexspec.

## Data

{result.conversations} conversations that the LLM wrote itself, user turns included (the method of Magpie,
arXiv 2406.08464, and tasks set over its own earlier texts): {result.answer_tokens} answer tokens after
{result.prompt_tokens} prompt tokens. {g.greedy_share:.0%} of the answers are greedy, the others drawn at temperature
{g.answer_temperature}. No outside text was used, neither to train nor to choose anything. One conversation in
{config.held_out_every} is held out.

## Training

{result.steps} steps of AdamW (peak rate {t.learning_rate:g}, cosine) over {t.epochs:g} epochs,
{result.trained_tokens} trained positions, unrolled {t.depths} depths: KL to the LLM's law plus {t.token_weight:g} x
cross entropy. CPU only, {t.threads} thread(s). Seeds {g.seed} and {t.seed}.

## Hit rates on held-out conversations

How often the LLM's next token is among the SSM's k likeliest; depth d has read d - 1 of its own states.

Greedy answers ({result.greedy.conversations} conversations, {result.greedy.tokens} tokens;
{result.greedy.coverage:.1%} of the tokens are in the reduced vocabulary):

{_table(result.greedy)}

Sampled answers, temperature {g.answer_temperature} ({result.sampled.conversations} conversations,
{result.sampled.tokens} tokens):

{_table(result.sampled)}

These are the LLM's own topics and phrasing; other prompts give other rates.
"""

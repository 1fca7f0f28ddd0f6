"""All settings that decide the outcome of a tune run, and the hashes that name its work folders."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from flexspec.errors import TuneError

FORMAT = 1  # raise when the meaning of cached shards or checkpoints changes


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """The self-generated conversations: ``shards`` times ``shard_size``. Lengths in tokens.

    ``batch`` changes speed only, never the text, and more shards leave the earlier ones as they are.
    """

    shards: int = 28
    shard_size: int = 256
    batch: int = 96
    max_invented_tokens: int = 96
    max_passage_tokens: int = 320
    max_prompt_tokens: int = 768
    max_answer_tokens: int = 192
    greedy_share: float = 0.65
    answer_temperature: float = 0.8
    task_share: float = 0.2
    invent_min_p: float = 0.02  # tokens below this share of the likeliest one's chance are never sampled
    answer_min_p: float = 0.002
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Distillation of the SSM."""

    epochs: float = 1.25
    batch_tokens: int = 1600  # rows of one optimiser step, padding included
    max_tokens: int = 640  # longer conversations keep their end
    depths: int = 3
    shallow_share: float = 0.3  # first part of the run, trained at depth 0 only
    depth_weight: float = 0.8
    deep_share: float = 0.7  # share of the rows that a depth after the first is trained on
    prompt_share: float = 0.15  # share of the prompt's tokens trained on besides all of the answer's
    token_weight: float = 0.1  # cross entropy of the token besides the teacher's law
    learning_rate: float = 1e-3
    vector_rate: float = 4.0  # learning rate of norm weights over that of matrices
    branch_scale: float = 0.1  # start of the layer's two output projections over the LLM's
    norm_scale: float = 0.4  # start of the final norm over the LLM's
    final_rate: float = 0.02  # last learning rate as a share of the peak
    warmup_steps: int = 30
    weight_decay: float = 0.02
    frequent: int = 2560  # most frequent reduced tokens, in every step's sub-vocabulary
    sampled: int = 1024  # reduced tokens drawn anew each step
    checkpoint_steps: int = 100
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TuneConfig:
    """A complete run."""

    generate: GenerateConfig = field(default_factory=GenerateConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    tap_layers: tuple[int, ...] = (8, 18)  # LLM layers whose outputs the SSM reads besides the last hidden state
    reduced_vocab_size: int = 8192  # tokens that the SSM is trained on, the most frequent ones
    draft_vocab_size: int = 4096  # of these, the most frequent that it drafts: a smaller head makes steps cheaper
    held_out_every: int = 32  # one conversation in so many is only measured on
    ngram_order: int = 4
    ngram_bytes: int = 8_000_000

    @property
    def exported_vocab_size(self) -> int:
        """Outputs of the exported SSM."""
        return min(self.draft_vocab_size, self.reduced_vocab_size)

    def check(self, llm_layers: int, vocab_size: int) -> None:
        """Raise TuneError when the run cannot fit the LLM."""
        if not self.tap_layers or list(self.tap_layers) != sorted(set(self.tap_layers)) or not all(
            0 < tap < llm_layers for tap in self.tap_layers
        ):  # fmt: skip
            raise TuneError(
                f"tap layers {list(self.tap_layers)}", f"rising layer numbers from 1 to {llm_layers - 1}",
                "choose --tap-layers inside the model",
            )  # fmt: skip
        if not 16 <= self.reduced_vocab_size <= vocab_size:
            raise TuneError(
                f"a reduced vocabulary of {self.reduced_vocab_size}", f"16 to {vocab_size} (the model's vocabulary)",
                "change --vocab",
            )  # fmt: skip
        if self.draft_vocab_size < 16:
            raise TuneError(f"a draft vocabulary of {self.draft_vocab_size}", "16 or more", "change --draft-vocab")

    def generate_key(self, source_hash: str) -> str:
        """Folder name of the generated data: model, generation settings and taps, but not batch and shard count."""
        settings = asdict(self.generate)
        del settings["batch"], settings["shards"]
        return _digest({"model": source_hash, "generate": settings, "taps": self.tap_layers,
                        "held_out": self.held_out_every})  # fmt: skip

    def train_key(self, source_hash: str) -> str:
        """Folder name of the checkpoints: the data and the training settings, checkpoint interval excluded."""
        settings = asdict(self.train)
        del settings["checkpoint_steps"]
        data = [self.generate_key(source_hash), self.generate.shards]
        return _digest({"data": data, "train": settings, "vocab": self.reduced_vocab_size})


def _digest(settings: dict[str, Any]) -> str:
    text = json.dumps({"format": FORMAT, **settings}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

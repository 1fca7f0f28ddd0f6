"""Distillation of the SSM: the optimiser loop with checkpoints, bit for bit the same if it is interrupted.

Shape letters: B sequences, T token positions, J taps, E hidden, V vocab, U sub-vocabulary, N trained rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexspec.errors import TuneError
from flexspec.host.files import new_file
from flexspec.runtime.tune.autograd import distil_loss, pad_rows
from flexspec.runtime.tune.batches import Batch, SubVocabulary, draw_sub_vocabulary, load_batch, plan_batches
from flexspec.runtime.tune.config import TrainConfig
from flexspec.runtime.tune.corpus import Conversation
from flexspec.runtime.tune.model import FusedStateNet, Weights

Report = Callable[[int, int, str], None]  # (steps done, total, detail)
_CLIP_NORM = 1.0
_BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Teacher:
    """What training needs of the LLM: embedding and LM head in the compute dtype."""

    embedding_VE: Tensor
    head_VE: Tensor
    keep_ids: Tensor  # token ids of the reduced vocabulary

    def reduced_ids(self) -> Tensor:
        """[V] token id -> reduced id, -1 for tokens outside the reduced vocabulary."""
        table = torch.full((len(self.head_VE),), -1)
        table[self.keep_ids] = torch.arange(len(self.keep_ids))
        return table


def prepare_torch(threads: int) -> None:
    """Thread count, and denormals flushed: softmax and exp are many times slower on them."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")  # shapes of a run times its products, all 3 ways
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine down to ``final_rate`` of the peak."""
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * step / max(1, steps)))
    return config.learning_rate * warm * (cosine * (1 - config.final_rate) + config.final_rate)


def batch_loss(
    net: FusedStateNet, weights: Weights, teacher: Teacher, batch: Batch, vocabulary: SubVocabulary,
    reduced_ids: Tensor, config: TrainConfig, depths: int, generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """The weighted sum over depths of the distillation loss.

    Output row r of depth j predicts the token at position r + j + 2; the LLM's law of a position is the head over its
    last state one position earlier, computed once for all depths.
    """
    ids, states, trained = batch.ids_BT, batch.states_BTJE, batch.trained_BT
    head = teacher.head_VE[teacher.keep_ids[vocabulary.columns_U]]
    outs = net.unroll(weights, teacher.embedding_VE[ids[:, 1:]], states[:, :-1], depths)
    rows = torch.full(trained.shape, -1)
    rows[trained] = torch.arange(int(trained.sum()))
    before = pad_rows(states[:, :-1, -1][trained[:, 1:]].to(head.dtype), 256)
    law = torch.softmax((before @ head.T).float().add_(vocabulary.shift_U), -1).to(head.dtype)
    target = vocabulary.column_of[reduced_ids[ids[trained]]]
    total = torch.zeros(())
    for j, out in enumerate(outs):
        chosen = trained[:, j + 2 :]
        if j:
            chosen = chosen & (torch.rand(chosen.shape, generator=generator) < config.deep_share)
        if chosen.any():
            picked = rows[:, j + 2 :][chosen]
            state = out[:, : chosen.shape[1]][chosen]
            loss = distil_loss(state, law[picked], target[picked], head, vocabulary.shift_U, config.token_weight)
            total = total + config.depth_weight**j * loss
    return total


class Trainer:
    """One run: ``start`` are the initial float32 weights, which are trained in place (a checkpoint replaces them)."""

    def __init__(
        self, net: FusedStateNet, start: Weights, teacher: Teacher, corpus: Sequence[Conversation], config: TrainConfig,
        folder: Path, compute: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        if not corpus:
            raise TuneError("no conversations to train on", "at least one", "generate more conversations")
        self._net, self._teacher, self._corpus, self._config = net, teacher, corpus, config
        self._checkpoint, self._compute = folder / "checkpoint.pt", compute
        self.weights = {name: w.clone().requires_grad_() for name, w in start.items()}
        matrices = [w for w in self.weights.values() if w.dim() > 1]
        vectors = [w for w in self.weights.values() if w.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": vectors, "weight_decay": 0.0, "share": config.vector_rate},
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=_BETAS, weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip
        self._plan = plan_batches([len(c.ids) for c in corpus], config)
        self._reduced_ids = teacher.reduced_ids()
        self.step = 0
        self.trained_tokens = 0
        self.losses: list[float] = []
        self._resume()

    @property
    def steps(self) -> int:
        return len(self._plan)

    def run(self, report: Report, until: int | None = None) -> Weights:
        """Train to the end (or to step ``until``) and return the float32 weights. Checkpoints on the way."""
        end = self.steps if until is None else min(until, self.steps)
        while self.step < end:
            self._one_step()
            if self.step % self._config.checkpoint_steps == 0 or self.step == end:
                self._save()
            recent = self.losses[-50:]
            report(self.step, self.steps, f"loss {sum(recent) / len(recent):.3f}")
        return {name: w.detach() for name, w in self.weights.items()}

    def _one_step(self) -> None:
        config = self._config
        rng = np.random.default_rng((config.seed, 2, self.step))
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        chosen = self._plan[self.step]
        batch = load_batch([self._corpus[i] for i in chosen], config, self._net.taps, rng)
        targets = self._reduced_ids[batch.ids_BT[batch.trained_BT]]
        vocabulary = draw_sub_vocabulary(targets, len(self._teacher.keep_ids), config, generator)
        batch = Batch(batch.ids_BT, batch.states_BTJE.to(self._compute), batch.trained_BT, batch.tokens)
        shallow = self.step < config.shallow_share * self.steps
        depths = min(1 if shallow else config.depths, batch.ids_BT.shape[1] - 2)
        cast = {name: w.to(self._compute) for name, w in self.weights.items()}
        loss = batch_loss(
            self._net, cast, self._teacher, batch, vocabulary, self._reduced_ids, config, depths, generator
        )
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), _CLIP_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps, config) * group.get("share", 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._note(float(loss.detach()), int(batch.trained_BT.sum()))

    def _note(self, loss: float, tokens: int) -> None:
        if not math.isfinite(loss):
            raise TuneError(
                f"a loss of {loss} at step {self.step}", "a finite loss",
                "lower --learning-rate and run again; the last checkpoint is older than this step",
            )  # fmt: skip
        self.step += 1
        self.trained_tokens += tokens
        self.losses.append(round(loss, 4))

    def _save(self) -> None:
        state = {
            "weights": {name: w.detach() for name, w in self.weights.items()},
            "optimizer": self._optimizer.state_dict(),
            "step": self.step, "trained_tokens": self.trained_tokens, "losses": self.losses,
        }  # fmt: skip
        with new_file(self._checkpoint) as file:
            torch.save(state, file)

    def _resume(self) -> None:
        if not self._checkpoint.is_file():
            return
        try:
            state: dict[str, Any] = torch.load(self._checkpoint, weights_only=True)
            with torch.no_grad():
                for name, weight in self.weights.items():
                    weight.copy_(state["weights"][name])
            self._optimizer.load_state_dict(state["optimizer"])
        except (OSError, RuntimeError, KeyError, ValueError, EOFError) as error:
            raise TuneError(
                f"checkpoint {self._checkpoint} cannot be read: {error}", "a checkpoint of this configuration",
                f"delete {self._checkpoint.name} to train from the start",
            ) from error  # fmt: skip
        self.step, self.trained_tokens, self.losses = state["step"], state["trained_tokens"], state["losses"]


def id_tensor(keep_ids: NDArray[np.int64]) -> Tensor:
    """Token ids as a tensor."""
    return torch.from_numpy(keep_ids.copy())

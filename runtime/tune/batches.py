"""Which conversations form which optimiser step, and the tensors of one step. All of it is a function of the seed.

Shape letters: B sequences, T token positions of a sequence, J taps, E hidden, N trained rows, U sub-vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexspec.arithmetic import ceil_div
from flexspec.runtime.tune.config import TrainConfig
from flexspec.runtime.tune.corpus import Conversation

# Sequences are padded to these lengths, so that a run has few matrix shapes: oneDNN generates code for each new one.
_LENGTHS = (64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512, 640, 768, 1024)


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded sequences."""

    ids_BT: Tensor
    states_BTJE: Tensor
    trained_BT: Tensor  # marks the positions whose token is a training target
    tokens: int  # without padding


@dataclass(frozen=True, slots=True)
class SubVocabulary:
    """The columns of one step's loss."""

    columns_U: Tensor  # reduced ids
    shift_U: Tensor  # of the logits, corrects for sampling the columns
    column_of: Tensor  # reduced id -> column, -1 for none


def padded_length(tokens: int) -> int:
    """The length that a sequence of ``tokens`` is padded to."""
    return next((length for length in _LENGTHS if length >= tokens), ceil_div(tokens, 256) * 256)


def plan_batches(lengths: Sequence[int], config: TrainConfig) -> list[NDArray[np.int64]]:
    """The conversations of every step of the run, epoch by epoch; a fraction of an epoch is cut short.

    A batch holds sequences of one padded length, neighbours drawn anew each epoch.
    """
    padded = np.array([padded_length(min(n, config.max_tokens)) for n in lengths])
    steps: list[NDArray[np.int64]] = []
    for epoch in range(math.ceil(config.epochs)):
        rng = np.random.default_rng((config.seed, 1, epoch))
        groups: list[NDArray[np.int64]] = []
        for length in np.unique(padded):
            members = rng.permutation(np.flatnonzero(padded == length))
            size = max(1, config.batch_tokens // int(length))
            groups += [members[i : i + size] for i in range(0, len(members), size)]
        shuffled = [groups[i] for i in rng.permutation(len(groups))]
        share = min(1.0, config.epochs - epoch)
        steps += shuffled[: max(1, round(share * len(shuffled)))]
    return steps


def load_batch(
    conversations: Sequence[Conversation], config: TrainConfig, taps: int, rng: np.random.Generator
) -> Batch:
    """Read the states of some conversations and mark their targets: all of the answer and a share of the prompt."""
    lengths = [min(len(c.ids), config.max_tokens) for c in conversations]
    rows, width = padded_length(max(lengths)), conversations[0].states.shape[1]
    ids = np.zeros((len(lengths), rows), np.int64)
    states = np.zeros((len(lengths), rows, width), np.uint16)
    trained = np.zeros((len(lengths), rows), bool)
    for r, (c, n) in enumerate(zip(conversations, lengths, strict=True)):
        cut = len(c.ids) - n
        prompt = max(2, c.prompt_tokens - cut)
        ids[r, :n], states[r, :n] = c.ids[cut:], c.states[cut:]
        trained[r, prompt:n] = True
        trained[r, 2:prompt] = rng.random(prompt - 2) < config.prompt_share
    bits = torch.from_numpy(states.view(np.int16)).view(torch.bfloat16)
    return Batch(
        torch.from_numpy(ids),
        bits.view(len(lengths), rows, taps, width // taps),
        torch.from_numpy(trained),
        sum(lengths),
    )


def draw_sub_vocabulary(targets: Tensor, size: int, config: TrainConfig, generator: torch.Generator) -> SubVocabulary:
    """The most frequent columns, all targets of the batch (reduced ids, -1 ignored), and a random draw of the others.

    The drawn columns stand for all columns left out, so their logits are raised by log(left out / drawn).
    """
    frequent = min(config.frequent, size)
    rare = torch.unique(targets[targets >= frequent])
    others = torch.randperm(size - frequent, generator=generator) + frequent
    others = others[~torch.isin(others, rare)][: max(0, config.sampled - len(rare))]  # one width in all steps
    columns = torch.cat([torch.arange(frequent), rare, others])
    shift = torch.zeros(len(columns))
    if len(others):
        shift[frequent + len(rare) :] = math.log(max(1, size - frequent - len(rare)) / len(others))
    column_of = torch.full((size + 1,), -1)
    column_of[columns] = torch.arange(len(columns))
    return SubVocabulary(columns, shift, column_of)

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

from flexspec.runtime.tune.config import TrainConfig
from flexspec.runtime.tune.corpus import Conversation

_JITTER_TOKENS = 12  # sequences of nearly the same length change their neighbours from epoch to epoch


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded sequences. ``trained_BT`` marks the positions whose token is a training target."""

    ids_BT: Tensor
    states_BTJE: Tensor
    trained_BT: Tensor
    tokens: int


@dataclass(frozen=True, slots=True)
class SubVocabulary:
    """The columns of one step's loss: reduced ids, the shift that corrects for sampling them, reduced id -> column."""

    columns_U: Tensor
    shift_U: Tensor
    column_of: Tensor


def plan_batches(lengths: Sequence[int], config: TrainConfig) -> list[NDArray[np.int64]]:
    """The conversations of every step of the whole run, epoch after epoch; a fraction of an epoch is cut short."""
    clipped = np.minimum(np.asarray(lengths), config.max_tokens)
    steps: list[NDArray[np.int64]] = []
    for epoch in range(math.ceil(config.epochs)):
        rng = np.random.default_rng((config.seed, 1, epoch))
        order = np.argsort(clipped + rng.integers(0, _JITTER_TOKENS, len(clipped)), kind="stable")
        groups: list[NDArray[np.int64]] = []
        start = 0
        while start < len(order):
            end = start + 1
            longest = int(clipped[order[start]])
            while (
                end < len(order) and max(longest, int(clipped[order[end]])) * (end + 1 - start) <= config.batch_tokens
            ):
                longest = max(longest, int(clipped[order[end]]))
                end += 1
            groups.append(order[start:end])
            start = end
        shuffled = [groups[i] for i in rng.permutation(len(groups))]
        share = min(1.0, config.epochs - epoch)
        steps += shuffled[: max(1, round(share * len(shuffled)))]
    return steps


def load_batch(
    conversations: Sequence[Conversation], config: TrainConfig, taps: int, rng: np.random.Generator
) -> Batch:
    """Read the states of some conversations and mark their targets: the whole answer and a share of the prompt."""
    lengths = [min(len(c.ids), config.max_tokens) for c in conversations]
    rows, width = max(lengths), conversations[0].states.shape[1]
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
    others = torch.randperm(size - frequent, generator=generator)[: config.sampled] + frequent
    others = others[~torch.isin(others, rare)]
    columns = torch.cat([torch.arange(frequent), rare, others])
    shift = torch.zeros(len(columns))
    if len(others):
        shift[frequent + len(rare) :] = math.log(max(1, size - frequent - len(rare)) / len(others))
    column_of = torch.full((size + 1,), -1)
    column_of[columns] = torch.arange(len(columns))
    return SubVocabulary(columns, shift, column_of)

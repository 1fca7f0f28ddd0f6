"""Hit rates of an SSM on held-out conversations: how often the true next token is among its k likeliest, by depth.

Measured along the conversation itself: depth 1 reads LLM states, deeper rows read the SSM's own outputs, as in a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flexspec.runtime.tune.batches import load_batch
from flexspec.runtime.tune.config import TrainConfig
from flexspec.runtime.tune.corpus import Conversation
from flexspec.runtime.tune.model import FusedStateNet, Weights
from flexspec.runtime.tune.train import Teacher

TOP = (1, 2, 4, 8)
_ROWS = 256


@dataclass(frozen=True, slots=True)
class HitRates:
    """Hit rates over some conversations."""

    conversations: int
    tokens: int
    coverage: float  # share of answer tokens that are in the reduced vocabulary
    hits: tuple[tuple[float, ...], ...]  # [depth - 1][i]: share of answer tokens among the TOP[i] likeliest


def true_ranks(state_NE: Tensor, head_UE: Tensor, target_N: Tensor) -> Tensor:
    """Rank (0 = likeliest) of each target column; a target of -1 ranks last."""
    ranks = torch.full(target_N.shape, len(head_UE))
    for i in range(0, len(state_NE), _ROWS):
        rows = slice(i, i + _ROWS)
        logits = (state_NE[rows] @ head_UE.T).float()
        target_logits = logits.gather(1, target_N[rows].clamp(min=0)[:, None])
        ranks[rows] = torch.where(target_N[rows] >= 0, (logits > target_logits).sum(1), len(head_UE))
    return ranks


@torch.no_grad()
def hit_rates(
    net: FusedStateNet, weights: Weights, teacher: Teacher, conversations: Sequence[Conversation], *, depths: int = 4,
    max_tokens: int = 640, compute: torch.dtype = torch.bfloat16,
) -> HitRates:  # fmt: skip
    """Hit rates over the answers of ``conversations`` (all of them; filter by temperature before)."""
    config = TrainConfig(max_tokens=max_tokens, prompt_share=0.0)
    reduced_ids = teacher.reduced_ids()
    head = teacher.head_VE[teacher.keep_ids].to(compute)
    cast = {name: w.to(compute) for name, w in weights.items()}
    ranks: list[list[Tensor]] = [[] for _ in range(depths)]
    answer: list[Tensor] = []
    for conversation in conversations:
        batch = load_batch([conversation], config, net.taps, np.random.default_rng(0))
        ids, first = batch.ids_BT[0, : batch.tokens], int(batch.trained_BT[0].nonzero()[0])  # the padding left out
        targets = reduced_ids[ids]
        answer.append(targets[first:])
        outs = net.unroll(
            cast,
            teacher.embedding_VE[ids[None, 1:]],
            batch.states_BTJE[:, : len(ids) - 1].to(compute),
            min(depths, len(ids) - 2),
        )
        for j, out in enumerate(outs):
            positions = torch.arange(first + j, len(ids))  # the root is a token of the answer or the prompt's last
            ranks[j].append(true_ranks(out[0, positions - j - 2], head, targets[positions]))
    covered = torch.cat(answer)
    hits = tuple(tuple(round(float((torch.cat(r) < k).float().mean()), 4) if r else 0.0 for k in TOP) for r in ranks)
    return HitRates(len(conversations), len(covered), round(float((covered >= 0).float().mean()), 4), hits)

"""What transformers computes for a step: the oracle of the model families.

Legend: T rows, V vocab, S committed tokens.
"""

from __future__ import annotations

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from flexspec.tree import TokenTree


def expected_logits(model: transformers.PreTrainedModel, committed: list[int], tree: TokenTree) -> NDArray[np.float32]:
    """[T,V] by transformers: committed tokens and tree in one pass under an explicit 4D mask."""
    s, n = len(committed), len(tree)
    visible = torch.ones(s + n, s + n, dtype=torch.bool).tril()
    bits = tree.ancestors()
    for i in range(n):
        visible[s + i, s:] = torch.tensor([bool(int(bits[i, j // 64]) >> (j % 64) & 1) for j in range(n)])
    mask = torch.zeros(s + n, s + n).masked_fill(~visible, torch.finfo(torch.float32).min)
    positions = torch.tensor([*range(s), *(s + depth for depth in tree.depths)])
    ids = torch.tensor([committed + list(tree.tokens)])
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask[None, None], position_ids=positions[None], use_cache=False)
    found: NDArray[np.float32] = out.logits[0, s:].numpy()
    return found

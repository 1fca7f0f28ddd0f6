"""Attention of one step on torch tensors, through the generated kernels.

Shape letters: T rows of the step, R requests, H query heads, G kv heads, D head dim, B pages of a request, P pages of
the pool, W ancestor words, N row tiles. Owns the tables that all layers of a step share and the order of arguments;
``run`` writes the K/V of the step's rows into the cache first. What launches is passed in (gpu/launch.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flexspec.arithmetic import ceil_div
from flexspec.graph import Attr
from flexspec.kernels.gpu.attention.variant import MERGE_ROWS, AttentionVariant
from flexspec.kernels.gpu.family import Kernels, KernelsOf, KernelStep

if TYPE_CHECKING:
    import torch

SPLIT_KEYS = 512  # keys one program folds; fixed, so that a row's order of summation depends on positions only


@dataclass(frozen=True, slots=True)
class StepTables:
    """What ``attend`` reads besides q, K and V: built once per step, used by every layer."""

    page_table_RB: torch.Tensor
    starts_R1: torch.Tensor
    contexts_R: torch.Tensor
    causal_R: torch.Tensor
    ancestors_TW: torch.Tensor
    tiles_N2: torch.Tensor
    splits: int
    split_keys: int


def row_tiles(starts_R1: NDArray[np.int32], tokens_per_tile: int, pad_to: int = 0) -> NDArray[np.int32]:
    """[N, 2] (request, first token) of each row tile, padded with request -1 up to ``pad_to`` tiles."""
    tiles = [
        (request, first)
        for request, tokens in enumerate(np.diff(starts_R1).tolist())
        for first in range(0, tokens, tokens_per_tile)
    ]
    tiles += [(-1, 0)] * (pad_to - len(tiles))
    return np.array(tiles, np.int32).reshape(-1, 2)


def step_tables(
    variant: AttentionVariant,
    page_table_RB: NDArray[np.int32],
    starts_R1: NDArray[np.int32],
    contexts_R: NDArray[np.int32],
    causal_R: NDArray[np.uint8],
    ancestors_TW: NDArray[np.uint64],
    device: str | torch.device,
    *,
    split_keys: int = SPLIT_KEYS,
    pad_tiles_to: int = 0,
) -> StepTables:
    """Move a step's tables to ``device`` (fields as in runtime's StepBatch) and cut its rows into tiles."""
    import torch

    def move(array: NDArray[np.generic], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device)

    longest = int((contexts_R + np.diff(starts_R1)).max())
    words = np.ascontiguousarray(ancestors_TW, np.uint64).view(np.int64)  # Triton's shifts want int64; same bits
    return StepTables(
        move(page_table_RB, np.int32), move(starts_R1, np.int32), move(contexts_R, np.int32), move(causal_R, np.int32),
        move(words, np.int64), move(row_tiles(starts_R1, variant.tokens_per_tile, pad_tiles_to), np.int32),
        ceil_div(longest, split_keys), split_keys,
    )  # fmt: skip


def tree_attention(
    kernels: Kernels,
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: StepTables,
    scale: float,
) -> torch.Tensor:
    """Attention output [T, H, D] in q's dtype. Caches are [P, page_tokens, G, D]; all tensors contiguous.

    Rows that belong to no tile are left unwritten.
    """
    import torch

    rows, heads, head_dim = q_THD.shape
    kv_heads = k_cache.shape[2]
    variant: AttentionVariant = kernels.variant
    assert (variant.head_dim, variant.group, variant.mask_words) == (
        head_dim, heads // kv_heads, tables.ancestors_TW.shape[1],
    ) and k_cache.shape[1] == variant.page_tokens  # fmt: skip
    assert tables.split_keys % kernels.config.block_keys == 0
    assert q_THD.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    out = torch.empty_like(q_THD)
    splits = tables.splits
    cells = rows * heads * splits if splits > 1 else 0
    partial = torch.empty(max(1, cells * head_dim), dtype=torch.float32, device=q_THD.device)
    partial_lse = torch.empty(max(1, cells), dtype=torch.float32, device=q_THD.device)
    kernels.launch(
        "attend",
        (tables.tiles_N2.shape[0], kv_heads, splits),
        (
            q_THD, k_cache, v_cache, tables.page_table_RB, tables.starts_R1, tables.contexts_R, tables.causal_R,
            tables.ancestors_TW, tables.tiles_N2, out, partial, partial_lse, scale * math.log2(math.e),
            tables.page_table_RB.shape[1], kv_heads, splits, tables.split_keys,
        ),
    )  # fmt: skip
    if splits > 1:
        grid = (ceil_div(rows * heads, MERGE_ROWS), 1, 1)
        kernels.launch("merge", grid, (partial, partial_lse, out, rows * heads, splits))
    return out


def run(
    kernels_of: KernelsOf,
    variant: AttentionVariant,
    attrs: Mapping[str, Attr],
    inputs: Sequence[torch.Tensor],
    step: KernelStep,
) -> tuple[torch.Tensor, ...]:
    """An attention node: write K/V through the page table, then attend. Results: output, K cache, V cache."""
    q, k, v, k_cache, v_cache = inputs[:5]
    words = max(variant.mask_words, step.arrays.ancestors_TW.shape[1])  # one kernel for all steps, also small trees
    variant = replace(variant, mask_words=words)
    if variant not in step.shared:
        step.shared[variant] = kernels_of(variant), _tables(variant, step), _slots(step)
    kernels, tables, slots_T = step.shared[variant]
    k_cache.flatten(0, 1).index_put_((slots_T,), k)
    v_cache.flatten(0, 1).index_put_((slots_T,), v)
    scale = attrs["scale"]
    assert isinstance(scale, float)
    return tree_attention(kernels, q.contiguous(), k_cache, v_cache, tables, scale), k_cache, v_cache


def _tables(variant: AttentionVariant, step: KernelStep) -> StepTables:
    arrays = step.arrays
    missing = variant.mask_words - arrays.ancestors_TW.shape[1]
    return step_tables(
        variant, arrays.page_table_RB, arrays.starts_R1, arrays.contexts_R, arrays.causal_R,
        np.pad(arrays.ancestors_TW, ((0, 0), (0, missing))), step.device, split_keys=step.split_keys,
    )  # fmt: skip


def _slots(step: KernelStep) -> torch.Tensor:
    import torch

    return torch.from_numpy(step.arrays.slots().astype(np.int64)).to(step.device)

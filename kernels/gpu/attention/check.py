"""Random cases of tree attention and a float64 reference for them: how the generated kernels are checked.

Shape letters as in launch.py. Used by the tests (Triton's interpreter) and by the check on a GPU. Owns cases,
inputs, reference and tolerances; it launches through launch.py like everything else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flexspec.arithmetic import ceil_div
from flexspec.kernels.gpu.attention.launch import row_tiles, step_tables, tree_attention
from flexspec.kernels.gpu.attention.variant import AttentionVariant
from flexspec.kernels.gpu.family import Kernels
from flexspec.types import PAGE_TOKENS, DType

if TYPE_CHECKING:
    import torch

# Largest absolute difference from float64 for inputs of unit variance: one unit in the last place of an output around
# 1 to 4, plus the rounding of softmax weights to the operand type before the second product.
TOLERANCE = {DType.F32: 2e-5, DType.F16: 4e-3, DType.BF16: 3e-2}


@dataclass(frozen=True, slots=True)
class RequestRows:
    """The rows of one request."""

    kind: str  # tree (random), forest (random, many roots), star, chain (as bits), causal (as a flag)
    context: int
    tokens: int


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A step to check."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    requests: tuple[RequestRows, ...]
    dtype: DType = DType.F32
    mode: str = "tree_verify"
    mask_words: int = 1
    row_tile: int = 16
    split_keys: int = 512  # a small number cuts a short context into several splits
    padding_tiles: int = 0

    @property
    def label(self) -> str:
        return f"{self.name} {self.dtype.value}"

    @property
    def limit(self) -> float:
        return TOLERANCE[self.dtype]

    @property
    def from_source(self) -> bool:
        """A subset with all dtypes, large and small tiles: Triton compiles again what it launches."""
        return self.head_dim == 128 or self in edge_cases()

    def error(self, kernels: Kernels, device: str) -> float:
        """As :func:`error_of`."""
        return error_of(self, kernels, device)

    def variant(self) -> AttentionVariant:
        group = self.heads // self.kv_heads
        return AttentionVariant(self.mode, self.head_dim, group, self.mask_words, self.dtype, self.row_tile)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Inputs of a case; ``ancestors_TW`` and the integer tables as in runtime's StepBatch."""

    q_THD: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table_RB: NDArray[np.int32]
    starts_R1: NDArray[np.int32]
    contexts_R: NDArray[np.int32]
    causal_R: NDArray[np.uint8]
    ancestors_TW: NDArray[np.uint64]


def _parents(request: RequestRows, rng: np.random.Generator) -> tuple[int, ...]:
    n = request.tokens
    if request.kind == "star":
        return (-1,) + (0,) * (n - 1)
    if request.kind in ("tree", "forest"):
        lowest = 0 if request.kind == "tree" else -1
        return (-1,) + tuple(int(rng.integers(lowest, i)) for i in range(1, n))
    return tuple(range(-1, n - 1))


def _ancestors(request: RequestRows, words: int, rng: np.random.Generator) -> NDArray[np.uint64]:
    if request.kind == "causal":  # must not matter: random bits would show it
        return rng.integers(0, 2**64, (request.tokens, words), np.uint64)
    table = np.zeros((request.tokens, words), np.uint64)
    for row, parent in enumerate(_parents(request, rng)):
        table[row] = table[parent] if parent >= 0 else 0
        table[row, row // 64] |= np.uint64(1 << (row % 64))
    return table


def make_inputs(case: AttentionCase, seed: int, device: str) -> AttentionInputs:
    """Random inputs of a case: unit normal q, K and V, shuffled pages, and NaN in every slot no row may read."""
    import torch

    rng = np.random.default_rng(seed)
    lengths = [request.context + request.tokens for request in case.requests]
    width = ceil_div(max(lengths), PAGE_TOKENS)
    pages = width * len(lengths) + 2
    table = rng.permutation(pages)[: width * len(lengths)].reshape(len(lengths), width).astype(np.int32)
    used = np.zeros(pages * PAGE_TOKENS, bool)
    for row, length in zip(table, lengths, strict=True):
        index = np.arange(length)
        used[row[index // PAGE_TOKENS] * PAGE_TOKENS + index % PAGE_TOKENS] = True
    dtype = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}[case.dtype]

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32)

    def cache() -> torch.Tensor:
        values = normal(pages * PAGE_TOKENS, case.kv_heads, case.head_dim)
        values[~used] = np.nan
        shape = (pages, PAGE_TOKENS, case.kv_heads, case.head_dim)
        return torch.from_numpy(values.reshape(shape)).to(device, dtype)

    starts = np.cumsum([0] + [request.tokens for request in case.requests]).astype(np.int32)
    return AttentionInputs(
        torch.from_numpy(normal(int(starts[-1]), case.heads, case.head_dim)).to(device, dtype),
        cache(),
        cache(),
        table,
        starts,
        np.array([request.context for request in case.requests], np.int32),
        np.array([request.kind == "causal" for request in case.requests], np.uint8),
        np.concatenate([_ancestors(request, case.mask_words, rng) for request in case.requests]),
    )


def reference(inputs: AttentionInputs, scale: float) -> torch.Tensor:
    """Attention [T, H, D] in float64 on the CPU, row by row."""
    import torch

    q, k, v = (t.double().cpu() for t in (inputs.q_THD, inputs.k_cache, inputs.v_cache))
    share = q.shape[1] // k.shape[2]
    out = torch.empty_like(q)
    for r, context in enumerate(inputs.contexts_R.tolist()):
        first, last = inputs.starts_R1[r : r + 2].tolist()
        index = np.arange(context + last - first)
        slots = torch.from_numpy(inputs.page_table_RB[r, index // PAGE_TOKENS] * PAGE_TOKENS + index % PAGE_TOKENS)
        keys = k.flatten(0, 1)[slots.long()].repeat_interleave(share, 1)
        values = v.flatten(0, 1)[slots.long()].repeat_interleave(share, 1)
        for row in range(first, last):
            words = [int(word) for word in inputs.ancestors_TW[row]]
            seen = list(range(context)) + [
                context + j
                for j in range(last - first)
                if (j <= row - first if inputs.causal_R[r] else words[j // 64] >> (j % 64) & 1)
            ]
            weights = (torch.einsum("hd,shd->hs", q[row], keys[seen]) * scale).softmax(-1)
            out[row] = torch.einsum("hs,shd->hd", weights, values[seen])
    return out


def run_case(case: AttentionCase, kernels: Kernels, inputs: AttentionInputs, device: str) -> torch.Tensor:
    """Launch the kernels on the inputs of a case; returns [T, H, D] in the case's dtype."""
    count = len(row_tiles(inputs.starts_R1, case.variant().tokens_per_tile))
    tables = step_tables(
        case.variant(), inputs.page_table_RB, inputs.starts_R1, inputs.contexts_R, inputs.causal_R,
        inputs.ancestors_TW, device, split_keys=case.split_keys, pad_tiles_to=count + case.padding_tiles,
    )  # fmt: skip
    # The order of tiles must not matter. Reversed, it exposes a tile that writes a row of the next one.
    tables = replace(tables, tiles_N2=tables.tiles_N2.flip(0).contiguous())
    return tree_attention(kernels, inputs.q_THD, inputs.k_cache, inputs.v_cache, tables, scale_of(case))


def scale_of(case: AttentionCase) -> float:
    return 1.0 / math.sqrt(case.head_dim)


def error_of(case: AttentionCase, kernels: Kernels, device: str, seed: int = 0) -> float:
    """Largest absolute difference between the kernels and float64; infinity for NaN."""
    inputs = make_inputs(case, seed, device)
    got = run_case(case, kernels, inputs, device).double().cpu()
    error = float((got - reference(inputs, scale_of(case))).abs().max())
    return error if error == error else float("inf")


def same_bits(case: AttentionCase, kernels: Kernels, device: str, seed: int = 0) -> dict[str, bool]:
    """Whether the rows of each request keep their bits when the request is alone and when its last rows are gone.

    Alone, a request is tiled apart from its neighbours and may need fewer splits, or no merge.
    """
    import torch

    inputs = make_inputs(case, seed, device)
    together = run_case(case, kernels, inputs, device)
    same = {}
    for request in range(len(case.requests)):
        first, last = inputs.starts_R1[request : request + 2].tolist()
        only = slice(request, request + 1)
        for rows in range(1, last - first + 1):
            fewer = replace(
                inputs, q_THD=inputs.q_THD[first : first + rows].contiguous(),
                page_table_RB=inputs.page_table_RB[only], starts_R1=np.array([0, rows], np.int32),
                contexts_R=inputs.contexts_R[only], causal_R=inputs.causal_R[only],
                ancestors_TW=inputs.ancestors_TW[first : first + rows],
            )  # fmt: skip
            out = run_case(case, kernels, fewer, device)
            same[f"request {request}, {rows} rows"] = torch.equal(out, together[first : first + rows])
    return same


def bit_case() -> AttentionCase:
    """Requests of different lengths for ``same_bits``: one needs several splits only because of another."""
    requests = (RequestRows("tree", 40, 9), RequestRows("causal", 150, 3), RequestRows("star", 64, 5))
    return AttentionCase("rows", 2, 1, 32, requests, split_keys=64)


def covering_cases() -> tuple[AttentionCase, ...]:
    """Every head dim, group, mask width and kind of request, each with every dtype; 1 to 4 splits."""
    mixed = (RequestRows("tree", 100, 7), RequestRows("causal", 33, 5), RequestRows("star", 63, 4))
    deep = (RequestRows("tree", 70, 12), RequestRows("chain", 0, 3))
    shapes = (
        AttentionCase("d32 mha", 2, 2, 32, (RequestRows("tree", 0, 20), RequestRows("causal", 64, 1))),
        AttentionCase("d64 group 3", 9, 3, 64, mixed, split_keys=64),
        AttentionCase("d80", 2, 2, 80, deep, split_keys=64),
        AttentionCase("d96 group 4", 4, 1, 96, mixed, row_tile=32),
        AttentionCase("d128 group 4", 8, 2, 128, deep, row_tile=64, padding_tiles=2),
        AttentionCase("d128 group 7", 7, 1, 128, mixed, row_tile=64, split_keys=128),
        AttentionCase("d192 group 2", 2, 1, 192, deep),
        AttentionCase("d256", 2, 2, 256, (RequestRows("tree", 31, 6),), split_keys=64),
        AttentionCase(
            "incremental", 6, 2, 64, (RequestRows("causal", 95, 1), RequestRows("forest", 40, 14)), mode="incremental"
        ),
        AttentionCase(
            "two words",
            4,
            1,
            64,
            (RequestRows("tree", 33, 110), RequestRows("causal", 65, 2)),
            mask_words=2,
            row_tile=64,
        ),
        AttentionCase("four words", 2, 1, 32, (RequestRows("tree", 5, 200),), mask_words=4, row_tile=64, split_keys=64),
    )
    exact = tuple(replace(case, row_tile=16) if case.head_dim > 64 else case for case in shapes)  # see row_tile_for
    typed = ((exact, DType.F32), (shapes, DType.F16), (shapes, DType.BF16))
    return tuple(replace(case, dtype=dtype) for cases, dtype in typed for case in cases)


def edge_cases() -> tuple[AttentionCase, ...]:
    """Float32 cases at the edges: one row, empty prefix, page, block, split and word boundaries, long chains."""
    one = [RequestRows("tree", context, 1) for context in (0, 31, 32, 63, 64, 65)]
    return (
        AttentionCase("one node at page and block edges", 2, 1, 32, tuple(one), split_keys=64),
        AttentionCase("tree across a page edge", 2, 1, 32, (RequestRows("tree", 30, 6), RequestRows("star", 62, 9))),
        AttentionCase("full word", 2, 2, 32, (RequestRows("chain", 40, 64), RequestRows("star", 1, 64)), row_tile=64),
        AttentionCase(
            "node 64 opens the second word", 1, 1, 32, (RequestRows("tree", 0, 65),), mask_words=2, row_tile=64
        ),
        AttentionCase("chain as bits", 2, 1, 64, (RequestRows("chain", 17, 9),)),
        AttentionCase(
            "prefill beyond the mask words", 2, 1, 32, (RequestRows("causal", 0, 150),), row_tile=64, split_keys=64
        ),
        AttentionCase(
            "prefill behind a prefix", 2, 1, 32, (RequestRows("causal", 90, 70), RequestRows("tree", 5, 3)), row_tile=64
        ),
        AttentionCase(
            "short request in a long step",
            2,
            1,
            32,
            (RequestRows("tree", 2, 2), RequestRows("causal", 250, 1)),
            split_keys=64,
        ),
        AttentionCase("context ends with a split", 2, 1, 32, (RequestRows("star", 128, 5),), split_keys=64),
        AttentionCase("only padding beside one row", 2, 1, 32, (RequestRows("causal", 3, 1),), padding_tiles=3),
    )


def check_cases(interpreted: bool) -> tuple[AttentionCase, ...]:
    """The cases of a check; only some in the interpreter, which is slow and computes bf16 wrongly."""
    if interpreted:
        return tuple(case for case in covering_cases() if case.dtype is DType.F32)
    return covering_cases() + edge_cases()

"""What the generated attention kernels are specialised for, how they are tiled, and their arguments.

Shape letters: T rows of the step, R requests, H query heads, G kv heads, D head dim, B pages of a request, P pages of
the pool, W ancestor words. Plain data, and how it follows from a graph: no Triton, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flexspec.arithmetic import ceil_div
from flexspec.errors import CompileError
from flexspec.graph import Node, as_int
from flexspec.kernels.gpu.family import TRITON_DTYPES, Entry
from flexspec.kernels.gpu.targets import Target
from flexspec.types import PAGE_TOKENS, DType, TensorType

MODES = ("tree_verify", "incremental")
MAX_MASK_WORDS = 8
MAX_ROW_TILE = 128


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """One specialisation of the attention kernels. Raises CompileError for one that no kernel can serve."""

    family: ClassVar[str] = "tree_attention"
    mode: str
    head_dim: int
    group: int  # query heads that share a kv head
    mask_words: int  # 64-bit ancestor words of a row
    dtype: DType
    row_tile: int  # rows (token x query head of the group) that one program works on
    page_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        def need(ok: bool, found: str, expected: str) -> None:
            if not ok:
                raise CompileError(f"attention variant with {found}", expected, "choose a variant inside these limits")

        need(self.mode in MODES, f"mode {self.mode!r}", f"one of {', '.join(MODES)}")
        need(self.dtype in TRITON_DTYPES, f"dtype {self.dtype.value}", "f32, f16 or bf16")
        dim_ok = self.head_dim % 16 == 0 and 16 <= self.head_dim <= 256
        need(dim_ok, f"head_dim {self.head_dim}", "a multiple of 16 from 16 to 256")
        need(1 <= self.mask_words <= MAX_MASK_WORDS, f"mask_words {self.mask_words}", f"1 to {MAX_MASK_WORDS}")
        tile_ok = _is_power_of_two(self.row_tile) and max(16, self.group) <= self.row_tile <= MAX_ROW_TILE
        need(self.group >= 1 and tile_ok, f"row_tile {self.row_tile} for a group of {self.group}",
             f"a power of two from 16 to {MAX_ROW_TILE} that holds the group")  # fmt: skip
        page_ok = _is_power_of_two(self.page_tokens) and self.page_tokens >= 16
        need(page_ok, f"page_tokens {self.page_tokens}", "a power of two of at least 16")

    @property
    def tokens_per_tile(self) -> int:
        """Tokens whose rows fill one tile; a group that is no power of two leaves the last rows of a tile empty."""
        return self.row_tile // self.group

    @property
    def name(self) -> str:
        """File-name safe and unique: ``tree_verify_d128_g4_w1_p32_r64_bf16``."""
        return (
            f"{self.mode}_d{self.head_dim}_g{self.group}_w{self.mask_words}"
            f"_p{self.page_tokens}_r{self.row_tile}_{self.dtype.value}"
        )


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How a variant is tiled."""

    block_keys: int  # keys per block
    warps: int
    stages: int  # of the pipeline
    # A loop of its own for the prefix keeps the mask out of it at the price of twice the code. On a variant that is
    # short of registers the single masked loop may be the one that does not spill.
    two_loops: bool = True

    @property
    def name(self) -> str:
        return f"k{self.block_keys}_w{self.warps}_s{self.stages}_{'two' if self.two_loops else 'one'}"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of one model as one rank runs it: what an artifact is compiled for."""

    mode: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: DType
    max_tree_tokens: int  # most rows in a step of a request that is not causal

    def variant(self) -> AttentionVariant:
        """The kernel variant that serves this shape. Raises CompileError when none does."""
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise CompileError(
                f"{self.heads} query heads over {self.kv_heads} kv heads", "a multiple of the kv heads",
                "check heads and kv_heads of the model and the TP degree",
            )  # fmt: skip
        group = self.heads // self.kv_heads
        words = max(1, ceil_div(self.max_tree_tokens, 64))
        tile = row_tile_for(self.mode, self.dtype, group, self.max_tree_tokens)
        return AttentionVariant(self.mode, self.head_dim, group, words, self.dtype, tile)


def variant_of(node: Node, types: Mapping[str, TensorType], max_tree_tokens: int) -> AttentionVariant:
    """The variant that serves an attention node. Raises CompileError when none does."""
    q, k_cache = types[node.inputs[0]], types[node.inputs[3]]
    mode = "incremental" if dict(node.attrs).get("mode") == "incremental" else "tree_verify"
    if k_cache.dtype is not q.dtype:
        raise CompileError(
            f"attention of {q.dtype.value} over a cache of {k_cache.dtype.value}",
            "caches of the activations' dtype, all that the kernel reads",
            "build the graph with one dtype for both",
        )
    heads, kv_heads, head_dim = as_int(q.dims[1]), as_int(k_cache.dims[2]), as_int(q.dims[2])
    return AttentionShape(mode, heads, kv_heads, head_dim, q.dtype, max_tree_tokens).variant()


# "*" is a pointer to elements of the variant's dtype.
_ATTEND_PARAMS = (
    ("q", "*"), ("k_cache", "*"), ("v_cache", "*"), ("page_table", "*i32"), ("starts", "*i32"), ("contexts", "*i32"),
    ("causal", "*i32"), ("ancestors", "*i64"), ("tiles", "*i32"), ("out", "*"), ("partial", "*fp32"),
    ("partial_lse", "*fp32"), ("scale", "fp32"), ("pages_per_request", "i32"), ("kv_heads", "i32"), ("splits", "i32"),
    ("split_keys", "i32"),
)  # fmt: skip
_MERGE_PARAMS = (("partial", "*fp32"), ("partial_lse", "*fp32"), ("out", "*"), ("rows", "i32"), ("splits", "i32"))
_MERGE_STAGES = 2  # `merge` has as many warps as `attend`, so that another configuration is another try for both
ENTRIES = (Entry("attend", _ATTEND_PARAMS), Entry("merge", _MERGE_PARAMS, _MERGE_STAGES))
MERGE_ROWS = 16  # rows of one `merge` program
PLAIN_CONFIG = TileConfig(32, 4, 2)


# Best first: wide key blocks and deep pipelines while they fit, then less of each, then the one-loop form.
_CONFIGS = (
    TileConfig(64, 4, 3),
    TileConfig(64, 8, 3),
    TileConfig(64, 8, 2),
    TileConfig(32, 4, 3),
    TileConfig(32, 8, 3),
    TileConfig(32, 8, 2),
    TileConfig(32, 4, 2),
    TileConfig(32, 8, 2, two_loops=False),
    TileConfig(16, 8, 2, two_loops=False),
    TileConfig(16, 4, 1, two_loops=False),
)


def candidate_configs(variant: AttentionVariant, target: Target) -> tuple[TileConfig, ...]:
    """Tile configurations to try in order; those known to spill are left out."""
    del target  # the same order for all targets so far; the budget check sorts them out
    narrow = tuple(config for config in _CONFIGS if config.block_keys <= 32)
    if variant.dtype is DType.F32:  # blocks twice as wide in bytes, and products unrolled over the threads
        return tuple(config for config in narrow if config.warps == 8)
    return narrow if variant.head_dim > 128 else _CONFIGS


def dim_parts(head_dim: int) -> tuple[tuple[int, int], ...]:
    """(offset, width) pieces of the head dim: powers of two of at least 16, largest first (80 = 64 + 16).

    Triton's ranges are powers of two; a padded range would waste up to half of the multiply work and registers.
    """
    parts: list[tuple[int, int]] = []
    offset = 0
    for bit in range(head_dim.bit_length() - 1, 3, -1):
        if head_dim >> bit & 1:
            parts.append((offset, 1 << bit))
            offset += 1 << bit
    return tuple(parts)


def row_tile_for(mode: str, dtype: DType, group: int, max_tokens: int) -> int:
    """Row tile of an executor, fixed for its life so that a row's bits do not depend on the rows beside it.

    64 rows is what turns on wgmma on sm_90; an SSM step, or a tree that never fills it, is served by 16 or 32. Exact
    float32 products are unrolled multiply-adds, so there 16 rows are already thousands of instructions.
    """
    rows = max(16, group, min(64, max_tokens * group))
    if mode == "incremental" or dtype is DType.F32:
        rows = min(rows, max(16, group))
    return 1 << (rows - 1).bit_length()


def _is_power_of_two(n: int) -> bool:
    return n >= 1 and n & (n - 1) == 0


def template_values(variant: AttentionVariant, config: TileConfig) -> dict[str, object]:
    """What the template reads besides variant and configuration."""
    del config
    title = {
        "tree_verify": "Tree attention of an LLM's verify step over a paged KV cache",
        "incremental": "Attention of an SSM's incremental step over a paged KV cache",
    }[variant.mode]
    # Triton's default for float32 operands is tf32, which is not what a float32 model asks for.
    precision = ', input_precision="ieee"' if variant.dtype is DType.F32 else ""
    return {"title": title, "parts": dim_parts(variant.head_dim), "precision": precision, "merge_rows": MERGE_ROWS}

"""Attention of the step's rows over a paged KV cache, with an ancestor mask among the rows of a request.

Row j of request r is written to logical slot contexts[r] + j. It sees every committed slot and, among the step's rows
of r, itself and its ancestors (bits), or all rows up to j if causal[r] is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexspec.arithmetic import ceil_div
from flexspec.ops.checks import activation, extent, require, same_dtype
from flexspec.ops.record import Attrs, KernelKey, OpRecord, TpLayout, register
from flexspec.types import DType, Role, TensorType

if TYPE_CHECKING:
    import torch

MODES = ("prefill", "incremental", "tree_verify")


def _shape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    q, k, v, k_cache, v_cache = types[:5]
    same_dtype("attention", types[:3])
    same_dtype("attention", types[3:5])
    ranks = [len(t.dims) for t in types]
    require(
        ranks == [3, 3, 3, 4, 4, 1, 1, 1, 2, 2], "attention", types,
        "q [T,H,D], k and v [T,G,D], caches [P,page,G,D], starts [R1], contexts [R], causal [R], page table [R,B], "
        "ancestors [T,W]",
    )  # fmt: skip
    heads, groups = q.dims[1], k.dims[1]
    require(
        isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups == 0,
        "attention", types, "query heads H that are a multiple of the kv heads G",
    )  # fmt: skip
    require(k.dims == v.dims == (q.dims[0], groups, q.dims[2]), "attention", types, "k and v of dims [T,G,D] as q")
    require(
        k_cache.dims == v_cache.dims and k_cache.dims[2:] == k.dims[1:], "attention", types,
        "caches of dims [P,page,G,D] with the G and D of k",
    )  # fmt: skip
    _check_step_inputs(types)
    require(attrs.get("mode", MODES[0]) in MODES, "attention", types, f"mode one of {', '.join(MODES)}")
    return activation(q, q.dims), _cache(k_cache), _cache(v_cache)


def _check_step_inputs(types: Sequence[TensorType]) -> None:
    starts, contexts, causal, pages, ancestors = types[5:]
    require(
        all(t.dtype is DType.I32 for t in (starts, contexts, causal, pages)) and ancestors.dtype is DType.U64,
        "attention", types, "i32 starts, contexts, causal and page table, u64 ancestors",
    )  # fmt: skip
    require(
        contexts.dims == causal.dims == pages.dims[:1] and ancestors.dims[0] == types[0].dims[0],
        "attention", types, "contexts, causal and page table over the same R, ancestors over the T of q",
    )  # fmt: skip


def _cache(like: TensorType) -> TensorType:
    return TensorType(like.dtype, like.dims, Role.KV)


def _seen(sizes: dict[str, int]) -> int:
    """Keys that one request's rows attend to: its committed context S and its share of the step's rows."""
    return sizes["S"] + ceil_div(sizes["T"], sizes["R"])


def _flops(ins: Sequence[TensorType], _outs: Sequence[TensorType], _attrs: Attrs, sizes: dict[str, int]) -> int:
    """Both products and the softmax, over each request's S committed tokens and the rows of the step."""
    head_dim = extent(ins[0].dims[2], sizes)
    heads = extent(ins[0].dims[1], sizes)
    return sizes["T"] * heads * _seen(sizes) * (4 * head_dim + 5)


def _bytes(ins: Sequence[TensorType], outs: Sequence[TensorType], _attrs: Attrs, sizes: dict[str, int]) -> int:
    """q, k, v and output; new K/V written; committed K/V of each request read once; the small step inputs."""
    cached = ins[3].dtype.size_bytes
    rows = sum(t.bytes(sizes) for t in ins[:3]) + outs[0].bytes(sizes) + 2 * ins[1].elements(sizes) * cached
    row_elements = extent(ins[1].dims[1], sizes) * extent(ins[1].dims[2], sizes)
    committed = 2 * sizes["R"] * _seen(sizes) * row_elements * cached
    return rows + committed + sum(t.bytes(sizes) for t in ins[5:])


def _visible(context: int, rows: int, causal: bool, words: torch.Tensor) -> torch.Tensor:
    """bool [rows, context + rows]: what each row of a request may see. ``words``: its ancestor bits as int64."""
    import torch

    index = torch.arange(rows, device=words.device)
    tail = index[None] <= index[:, None] if causal else ((words[:, index // 64] >> (index % 64)) & 1).bool()
    return torch.cat([torch.ones(rows, context, dtype=torch.bool, device=words.device), tail], 1)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(q k^T scale) v in float32 (or wider); q [n,H,D], keys and values [s,G,D], visible bool [n,s]."""
    import torch

    wide = torch.promote_types(q.dtype, torch.float32)
    share = q.shape[1] // keys.shape[1]
    keys, values = (t.to(wide).repeat_interleave(share, 1) for t in (keys, values))
    scores = torch.einsum("nhd,shd->hns", q.to(wide), keys) * scale
    weights = scores.masked_fill(~visible[None], float("-inf")).softmax(-1)
    return torch.einsum("hns,shd->nhd", weights, values).to(q.dtype)


def _reference(inputs: Sequence[torch.Tensor], attrs: Attrs) -> tuple[torch.Tensor, ...]:
    import torch

    q, k, v, k_cache, v_cache, starts, contexts, causal, page_table, ancestors = inputs
    scale = attrs["scale"]
    assert isinstance(scale, float)
    k_new, v_new, out = k_cache.clone(), v_cache.clone(), torch.empty_like(q)
    k_slots, v_slots, page = k_new.flatten(0, 1), v_new.flatten(0, 1), k_cache.shape[1]
    words = ancestors.view(torch.int64) if ancestors.dtype == torch.uint64 else ancestors
    for r, context in enumerate(contexts.tolist()):
        rows = slice(int(starts[r]), int(starts[r + 1]))
        count = rows.stop - rows.start
        logical = torch.arange(context + count, device=q.device)
        slots = page_table[r, logical // page].long() * page + logical % page
        k_slots[slots[context:]], v_slots[slots[context:]] = k[rows].to(k_new.dtype), v[rows].to(v_new.dtype)
        visible = _visible(context, count, bool(causal[r]), words[rows])
        out[rows] = _attend(q[rows], k_slots[slots], v_slots[slots], visible, scale)
    return out, k_new, v_new


ATTENTION = register(
    OpRecord(
        name="attention",
        doc="Paged attention with an ancestor mask: o [T,H,D] and both caches with the step's rows written.",
        arity=(10, 10),
        shape=_shape,
        flops=_flops,
        bytes=_bytes,
        layouts=(
            TpLayout("replicated", (None,), (None,)),
            TpLayout("heads", (1, 1, 1, 2, 2, None), (1, 2, 2), covers=((1, 2, 3, 4), (1, 2))),
        ),
        reference=_reference,
        kernel=KernelKey(cpu="attention", triton="tree_attention"),
        attrs={"scale": float},
        optional_attrs={"mode": str},
    )
)

"""Mixture of experts: router (which experts a row goes to, and their weights) and moe_experts (what they compute).

Each row uses ``top_k`` of X experts. Routing is dense, [T,X] with zeros for the others: ranks that have some of the
experts take those columns, so only a dim is cut. Each row adds up its experts by increasing index, so that its result
does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexspec.graph import as_int
from flexspec.ops.checks import activation, extent, require, same_dtype
from flexspec.ops.record import Attrs, KernelKey, OpRecord, TpLayout, io_bytes, register
from flexspec.types import TensorType

if TYPE_CHECKING:
    import torch

SOFTMAX = ("all", "chosen")  # over all experts before the top k are chosen, or over the chosen ones


def _router_shape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    x, weight = types
    same_dtype("router", types)
    require(
        len(x.dims) == 2 and len(weight.dims) == 2 and weight.dims[1] == x.dims[1] and isinstance(weight.dims[0], int),
        "router", types, "x of dims [T,E] and a weight of dims [X,E]",
    )  # fmt: skip
    experts, top_k, softmax = weight.dims[0], as_int(attrs["top_k"]), attrs["softmax"]
    assert isinstance(experts, int)
    require(1 <= top_k <= experts, "router", types, f"top_k from 1 to {experts} (found top_k={top_k})")
    require(softmax in SOFTMAX, "router", types, f"softmax one of {', '.join(SOFTMAX)} (found {softmax!r})")
    return (activation(x, (x.dims[0], experts)),)


def _router_flops(ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Attrs, sizes: dict[str, int]) -> int:
    """The product, and a few operations per element for the softmax and each of the ``top_k`` choices."""
    rows = extent(ins[0].dims[0], sizes)
    return 2 * rows * ins[1].elements(sizes) + (4 + as_int(attrs["top_k"])) * outs[0].elements(sizes)


def _router(inputs: Sequence[torch.Tensor], attrs: Attrs) -> tuple[torch.Tensor, ...]:
    """Softmax in float32, as in transformers. Among equal experts, the lower index is chosen first.

    One expert's scores at a time: a matrix product may sum its columns in different orders (on AMD Zen 4 it does), so
    that equal rows of the router would get unequal scores, and rounding would break ties instead of the index.
    """
    import torch

    x, weight = inputs
    wide = torch.promote_types(x.dtype, torch.float32)
    x_TE = x.to(wide)
    scores_TX = torch.stack([(x_TE * row_E).sum(-1) for row_E in weight.to(wide)], dim=-1)
    scores_TX = scores_TX.to(x.dtype).to(wide)  # rounded like the result of a product
    if attrs["softmax"] == "all":
        scores_TX = scores_TX.softmax(-1)
    ranked = torch.sort(scores_TX, dim=-1, descending=True, stable=True)
    top_k = as_int(attrs["top_k"])
    values, chosen = ranked.values[:, :top_k], ranked.indices[:, :top_k]
    if attrs["softmax"] == "chosen":
        values = values.softmax(-1)
    if attrs["normalize"]:
        values = values / values.sum(-1, keepdim=True)
    return (torch.zeros_like(scores_TX).scatter_(1, chosen, values).to(x.dtype),)


def _experts_shape(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    op, (x, routing, gate, up, down) = "moe_experts", types
    same_dtype(op, types)
    require(
        len(x.dims) == 2 and len(gate.dims) == 3 and gate.dims[2] == x.dims[1] and up.dims == gate.dims,
        op, types, "x of dims [T,E], gate and up weights of equal dims [X,F,E]",
    )  # fmt: skip
    local_experts, ffn, width = gate.dims
    down_dims = (local_experts, width, ffn)
    require(down.dims == down_dims, op, types, f"a down weight of dims [{local_experts},{width},{ffn}]")
    require(routing.dims == (x.dims[0], local_experts), op, types, f"routing of dims [{x.dims[0]},{local_experts}]")
    require(all(isinstance(dim, int) for dim in gate.dims), op, types, "weights of fixed dims")
    experts, top_k = as_int(attrs["experts"]), as_int(attrs["top_k"])
    assert isinstance(local_experts, int)
    require(
        local_experts <= experts and 1 <= top_k <= experts,
        op, types, f"experts={experts} to be {local_experts} or more and top_k={top_k} to be 1 to {experts}",
    )  # fmt: skip
    return (activation(x, x.dims),)


def _calls(ins: Sequence[TensorType], attrs: Attrs, sizes: dict[str, int]) -> float:
    """Expected number of (row, expert) pairs with this rank's experts, if all experts are chosen equally often."""
    share = extent(ins[2].dims[0], sizes) / as_int(attrs["experts"])
    return extent(ins[0].dims[0], sizes) * as_int(attrs["top_k"]) * share


def expected_experts(local_experts: int, experts: int, top_k: int, rows: int) -> float:
    """How many of a rank's experts are read, if each of ``rows`` rows chooses ``top_k`` of ``experts`` at random.

    An upper estimate: rows of one text make similar choices.
    """
    return local_experts * (1.0 - (1.0 - top_k / experts) ** rows)


def _experts_flops(ins: Sequence[TensorType], _outs: Sequence[TensorType], attrs: Attrs, sizes: dict[str, int]) -> int:
    """Three products per pair, and the weighted sum."""
    _, ffn, width = (extent(dim, sizes) for dim in ins[2].dims)
    return round(_calls(ins, attrs, sizes) * (6 * ffn * width + 2 * width + 5 * ffn))


def _experts_bytes(ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Attrs, sizes: dict[str, int]) -> int:
    """Rows in and out, and the weights of the experts that are read: few in a small step, soon all of them."""
    local_experts = extent(ins[2].dims[0], sizes)
    rows = extent(ins[0].dims[0], sizes)
    experts, top_k = as_int(attrs["experts"]), as_int(attrs["top_k"])
    share_read = expected_experts(local_experts, experts, top_k, rows) / local_experts
    weights = sum(kind.bytes(sizes) for kind in ins[2:])
    return ins[0].bytes(sizes) + ins[1].bytes(sizes) + outs[0].bytes(sizes) + round(share_read * weights)


def _experts(inputs: Sequence[torch.Tensor], _attrs: Attrs) -> tuple[torch.Tensor, ...]:
    import torch
    from torch.nn import functional

    x_TE, routing_TX, gate_XFE, up_XFE, down_XEF = inputs
    y_TE = torch.zeros_like(x_TE)
    for expert in range(gate_XFE.shape[0]):
        rows = routing_TX[:, expert].nonzero()[:, 0]
        if len(rows):
            x = x_TE[rows]
            h = functional.silu(functional.linear(x, gate_XFE[expert])) * functional.linear(x, up_XFE[expert])
            y_TE[rows] += routing_TX[rows, expert, None] * functional.linear(h, down_XEF[expert])
    return (y_TE,)


ROUTER = register(
    OpRecord(
        name="router",
        doc="x [T,E], weight [X,E] -> routing [T,X]: weights of the top_k experts of a row, 0 for the others.",
        arity=(2, 2),
        shape=_router_shape,
        flops=_router_flops,
        bytes=io_bytes,
        # Small, and every rank needs all of it: cutting it would cost one more exchange.
        layouts=(TpLayout("replicated", (None, None), (None,)),),
        reference=_router,
        kernel=KernelKey(cpu="router"),
        products=(0,),
        attrs={"top_k": int, "softmax": str, "normalize": bool},
    )
)

MOE_EXPERTS = register(
    OpRecord(
        name="moe_experts",
        doc="sum over a row's experts of routing * down(silu(x @ gate^T) * (x @ up^T)), by increasing index -> [T,E].",
        arity=(5, 5),
        shape=_experts_shape,
        flops=_experts_flops,
        bytes=_experts_bytes,
        # ffn before experts: cut by ffn, every rank reads an equal part of each expert that is used, even if few are;
        # cut by experts, the rank that has the experts in use does most of the work.
        layouts=(
            TpLayout("replicated", (None,), (None,)),
            TpLayout("ffn", (None, None, 1, 1, 2), ("partial",)),
            TpLayout("experts", (None, 1, 0, 0, 0), ("partial",)),
        ),
        reference=_experts,
        kernel=KernelKey(cpu="moe_experts"),
        products=(0,),
        attrs={"top_k": int, "experts": int},
    )
)

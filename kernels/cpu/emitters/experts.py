"""How mixtures of experts become calls of templates/cpu/experts.h, and the buffers that they need in between."""

from __future__ import annotations

from flexspec.arithmetic import ceil_div
from flexspec.graph import Node
from flexspec.kernels.cpu.emitter import Emit, Emitter
from flexspec.kernels.cpu.places import row_count, row_stride
from flexspec.types import DType

HEADER = "experts.h"
_MIN_BUFFER_ROWS = 32  # what any buffer of the arena has room for, see buf() in cpu/render.py


def router(e: Emitter, index: int, node: Node) -> None:
    """The scores by a matrix product, made into routing weights in place."""
    x, weight = node.inputs
    experts, columns = e.graph.types()[weight].dims
    rows, source = row_count(e.graph, x), e.read(x, elem=True)
    out = e.rows(e.allocate(node.outputs[0].name, elem=False))
    kinds, matrix = e.matrix("matrix", weight)
    e.call(
        f"gemm<{kinds}, {columns}, {experts}>(c, tid, {rows}, {source}, {matrix}, StoreRows{{{out}, nullptr}})",
        row_local=False,
    )
    flags = ", ".join("true" if flag else "false" for flag in (node.attr("softmax") == "all", node.attr("normalize")))
    e.call(f"route<{experts}, {node.attr('top_k')}, {flags}>(c, tid, {rows}, {out})")


def moe_experts(e: Emitter, index: int, node: Node) -> None:
    """List and gather the rows of each expert, then both products; four calls with barriers between them."""
    x, routing, gate, up, down = node.inputs
    experts, ffn, width = e.graph.types()[gate].dims
    top_k = node.attr("top_k")
    assert isinstance(experts, int) and isinstance(ffn, int) and isinstance(width, int) and isinstance(top_k, int)
    chosen = min(top_k, experts)  # experts of a row
    element_bytes = 2 if e.dtype is DType.BF16 else 4
    rows, source, weights = row_count(e.graph, x), e.read(x, elem=True), e.read(routing, elem=False)
    out = e.rows(e.allocate(node.outputs[0].name, elem=False))
    numbers = e.arena.take(4 * (chosen + ceil_div(experts + 1, _MIN_BUFFER_ROWS)))
    taken = [numbers]

    def pairs(columns: int) -> str:
        """Rows of a buffer that holds ``chosen`` of them for each row of the step."""
        ld = row_stride(columns, element_bytes)
        taken.append(e.arena.take(chosen * ld * element_bytes))
        return f"Rows<{e.elem}>{{buf<{e.elem}>(c, {taken[-1]}), {ld}}}"

    lists = f"ExpertRows<{experts}>(buf<int32_t>(c, {numbers}))"
    gathered, hidden = pairs(width), pairs(ffn)
    gate_up_kinds, gate_up = e.matrix("experts_swiglu", gate, up)
    down_kinds, last = e.matrix("experts", down)
    for call in (
        f"list_experts<{experts}, {chosen}>(tid, {rows}, {weights}, {lists})",
        f"gather_experts<{e.elem}, {width}>(c, tid, {lists}, {source}, {gathered})",
        f"experts_swiglu<{gate_up_kinds}, {width}, {ffn}>(c, tid, {lists}, {gathered}, {gate_up}, {hidden})",
        f"experts_down<{down_kinds}, {ffn}, {width}>(c, tid, {rows}, {lists}, {weights}, {hidden}, {last}, {out})",
    ):
        e.call(call, row_local=False)
    for buffer in taken:
        e.arena.give(buffer)


EMITTERS: dict[str, Emit] = {"router": router, "moe_experts": moe_experts}

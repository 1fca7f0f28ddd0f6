"""Exchanges between ranks, and a rank's rows of a shared table; the functions called are HELPERS in exchange.py."""

from __future__ import annotations

from flexspec.errors import CompileError
from flexspec.graph import Node
from flexspec.kernels.cpu.emitter import Emit, Emitter
from flexspec.kernels.cpu.exchange import SHARED
from flexspec.kernels.cpu.places import has_exchanges, row_count

_NOTHING = "Rows<float>{nullptr, 0}"


def exchange(e: Emitter, index: int, node: Node) -> None:
    """A reduce, combine, replicate or recv: rows in (where the rank has any), rows out."""
    operand, result = node.inputs[0], node.outputs[0]
    source = e.read(operand, elem=False) if e.graph.types()[operand].dtype.is_float else _NOTHING
    out = e.allocate(result.name, elem=False)
    e.call(f"exchange(tid, {index}, {row_count(e.graph, result.name)}, {source}, {e.rows(out)})", row_local=False)


def send(e: Emitter, index: int, node: Node) -> None:
    """Rows in only: this rank does not read the result."""
    source = e.read(node.inputs[0], elem=False)
    e.call(f"exchange(tid, {index}, {row_count(e.graph, node.inputs[0])}, {source}, {_NOTHING})", row_local=False)


def embedding_share(e: Emitter, node: Node, index: str) -> None:
    """Rows of the ids that this rank holds, zeros for the others."""
    if not has_exchanges(e.graph):
        raise CompileError(
            f"an embedding of a part of the vocabulary, {node.attrs}", "a graph that sums it up", "plan one rank"
        )
    table = node.inputs[1]
    number = [reader for reader in e.graph.nodes if SHARED in dict(reader.attrs)].index(node)
    rows, columns = e.graph.types()[table].dims[0], e.columns(table)
    kinds, matrix = e.matrix("matrix", table)
    out = e.rows(e.allocate(node.outputs[0].name, elem=False))
    local_ids = f"reinterpret_cast<int32_t*>(buf<float>(c, {e.arena.take(64, padded=True)}))"  # 16 numbers a row
    e.call(f"own_ids(tid, s.T, {index}, {number}, {rows}, {local_ids})", row_local=False)
    e.call(f"embedding<{kinds}, {columns}>(c, tid, s.T, {local_ids}, {matrix}, {out})")
    e.call(f"zero_others(c, tid, s.T, {local_ids}, {out}, {columns})")


EMITTERS: dict[str, Emit] = {"exchange": exchange, "send": send}

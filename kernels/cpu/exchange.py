"""CPU code of a rank among several: its exchanges with the others, and the tables that it holds a part of.

A program with exchanges calls back into the process that runs it, on the thread that called the step, with the number
of the node in the graph, the rows to send and the rows to fill. The transport does the rest
(runtime/executors/cpu_rank.py). A program does not know its rank: ranks with shares of equal size run the same one.
"""

from __future__ import annotations

from dataclasses import replace

from flexspec.graph import Graph, Node
from flexspec.ops.bounds import IDS, NO_LIMIT
from flexspec.ops.record import Collective, record_of
from flexspec.text import print_node

SHARED = "first_row"  # the attribute of an embedding whose table ranks share

# Rendered into programs that need it. The pointer is the thread's: several ranks in one process may share a library.
HELPERS = """
// Exchanges with other ranks: the thread that called the step hands them over (kernels/cpu/exchange.py).
using OnExchange = void (*)(int node, int rows, const float* in, int in_ld, float* out, int out_ld);
thread_local OnExchange on_exchange = nullptr;
thread_local const int* first_rows = nullptr;  // of the rows that the rank holds of each table it shares
inline void exchange(int tid, int node, int rows, Rows<float> in, Rows<float> out) {
  if (tid == 0) on_exchange(node, rows, in.p, in.ld, out.p, out.ld);
}
// Ids of the rows that this rank holds, counted from its first, others as 0; then [T] whether it holds them.
inline void own_ids(int tid, int T, const int32_t* ids, int table, int held, int32_t* own) {
  if (tid != 0) return;
  const int first = first_rows[table];
  for (int t = 0; t < T; t++) {
    own[T + t] = ids[t] >= first && ids[t] < first + held;
    own[t] = own[T + t] ? ids[t] - first : 0;
  }
}
inline void zero_others(Ctx& c, int tid, int T, const int32_t* own, Rows<float> y, int columns) {
  Range rows = share(T, tid, c.team.size());
  for (int t = rows.lo; t < rows.hi; t++)
    if (!own[T + t])
      for (int k = 0; k < columns; k++) y.row(t)[k] = 0;
}
"""
ENTRY = """
extern "C" void fs_on_exchange(OnExchange f, const int* firsts) { on_exchange = f, first_rows = firsts; }
"""


def split_logits(graph: Graph) -> tuple[Graph, Node | None]:
    """The graph up to a rank's share of the logits, and the combine that completes them (None: they are complete).

    Logits are written straight to the caller; what joins them comes after the step.
    """
    last = next((node for node in graph.nodes if node.outputs[0].name == graph.outputs[0]), None)
    if last is None or record_of(last).collective is not Collective.ALL_GATHER:
        return graph, None
    nodes = tuple(node for node in graph.nodes if node is not last)
    return Graph(graph.name, graph.inputs, nodes, (last.inputs[0], *graph.outputs[1:])), last


def comment_of(node: Node) -> str:
    """The node as text, without its block and the attributes that differ between ranks."""
    ranked = record_of(node).exchange or SHARED in dict(node.attrs)
    return print_node(replace(node, attrs=() if ranked else node.attrs, block=None))


def first_rows(graph: Graph) -> tuple[int, ...]:
    """Where this rank's part of each shared table begins, in the order of the nodes that read them."""
    return tuple(value for node in graph.nodes for key, value in node.attrs if key == SHARED and isinstance(value, int))


def held_ids(graph: Graph) -> tuple[int, int]:
    """The first token id whose row this rank holds, and how many follow; any id (0, NO_LIMIT) where it embeds none."""
    types = graph.types()
    for node in graph.nodes:
        if record_of(node).bounds is not None and IDS in node.inputs:
            first, rows = dict(node.attrs).get(SHARED, 0), types[node.inputs[1]].dims[0]
            assert isinstance(first, int) and isinstance(rows, int)
            return first, rows
    return 0, NO_LIMIT

"""Generates the C++ source of a model's step from its lowered graph: one call of a template kernel per operator.

The source is readable on purpose: each call carries the graph line it came from. Kernels are in templates/cpu; which
one an operator uses is its record's kernel key. There are barriers only where a kernel reads what other threads wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexspec.errors import CompileError
from flexspec.graph import Graph
from flexspec.kernels.cpu.emitter import BARRIER, Emitter
from flexspec.kernels.cpu.emitters.registry import kernel_emitters
from flexspec.kernels.cpu.exchange import ENTRY, HELPERS, comment_of
from flexspec.kernels.cpu.facts import SYMBOL, ProgramFacts, facts_of
from flexspec.kernels.cpu.pack import PackedWeight
from flexspec.kernels.cpu.places import Roots, element_type, has_exchanges, kernel_of
from flexspec.step_sizes import feature_outputs, has_logits


@dataclass(frozen=True, slots=True)
class CpuProgram:
    """Generated source, the weight table to pack for it, and the sizes it has compiled in."""

    source: str
    weights: tuple[PackedWeight, ...]
    facts: ProgramFacts


def render(graph: Graph) -> CpuProgram:
    """The C++ program of a lowered graph. Raises CompileError for what no template covers."""
    if has_logits(graph):
        _check_logits(graph)
    e = Emitter(graph, Roots(graph), element_type(graph))
    emitters = kernel_emitters()
    for i, node in enumerate(graph.nodes):
        kernel = kernel_of(node)
        if kernel not in emitters:
            raise CompileError(
                f"operator {node.op} has the CPU kernel key {kernel!r}",
                f"one of {', '.join(emitters)}",
                "give its record a known key, or add a template and a file of kernels/cpu/emitters",
            )
        if kernel != "view":
            comment = f"    // {comment_of(node)}"
            start = len(e.lines)
            emitters[kernel].emit(e, i, node)
            at = start + 1 if len(e.lines) > start and e.lines[start] == BARRIER else start
            e.lines.insert(at, comment)
            e.lines.append(f"    c.mark(tid, {i});")
        e.release(i)
    _export_features(e)
    if len(set(e.layer_types)) > 1:
        raise CompileError(
            f"graph {graph.name} mixes attention shapes {sorted(set(e.layer_types))}",
            "one (heads, kv heads, head dim) for all layers",
            "split the model into graphs of one attention shape each",
        )
    return _finish(e)


def _export_features(e: Emitter) -> None:
    """Copy the graph's feature outputs, side by side, into the caller's buffer."""
    names = feature_outputs(e.graph)
    total = sum(e.columns(name) for name in names)
    column = 0
    if names:
        e.lines.append("    if (s.features_out) {")
    for name in names:
        target = f"Rows<float>{{s.features_out + {column}, {total}}}"
        e.call(f"copy_rows<float, float>(c, tid, s.T, {e.columns(name)}, {e.read(name, elem=False)}, {target})")
        column += e.columns(name)
    if names:
        e.lines.append("    }")


def _finish(e: Emitter) -> CpuProgram:
    offsets, total = [], 0
    for row_bytes in e.arena.row_bytes:
        offsets.append(total)
        total += row_bytes
    attention = f"Attention<{e.layer_types[0]}>" if e.layer_types else ""
    kv = ""
    if e.layer_types:
        elem, _, kv_heads, size = e.layer_types[0].split(", ")
        kv = f"KvLayout<{elem}, {kv_heads}, {size}>"
    ranked = has_exchanges(e.graph)
    facts = facts_of(e.graph, tuple(e.table))
    source = PROGRAM.format(
        name=e.graph.name.rpartition(".rank")[0] if ranked else e.graph.name,
        includes="".join(f'#include "{name}"\n' for name in _headers(e)),
        hash="of a rank" if ranked else e.graph.hash(),
        offsets=", ".join(str(o) for o in offsets) or "0",
        row_bytes=total,
        layers=len(e.layer_types),
        page_bytes=f"{kv}::page_bytes" if kv else "0",
        scratch=f"{attention}::scratch_bytes(max_positions, max_rows)" if kv else "(void)max_positions, max_rows * 0",
        move=f"{kv}::move(reinterpret_cast<{e.elem}*>(layer), n, src, dst)"
        if kv
        else "(void)layer, (void)n, (void)src, (void)dst",
        body="\n".join(e.lines),
        helpers=HELPERS if ranked else "",
        entry=ENTRY if ranked else "",
        symbol=SYMBOL,
        facts=", ".join(str(number) for number in facts.numbers()),
    )
    return CpuProgram(source, tuple(e.table), facts)


def _headers(e: Emitter) -> list[str]:
    """What the program includes besides entry.h: templates of its operators, expansions of its weights."""
    emitters = kernel_emitters()
    of_kernels = {emitters[kernel_of(node)].header for node in e.graph.nodes}
    return [*sorted(filter(None, of_kernels)), *(f"weights/{name}.h" for name in sorted(e.formats))]


def _check_logits(graph: Graph) -> None:
    """Only a linear's epilogue writes logits; anything after it would be computed and never returned."""
    name = graph.outputs[0]
    made_by = next((node for node in graph.nodes if name in [value.name for value in node.outputs]), None)
    if made_by is None or kernel_of(made_by) != "linear":
        raise CompileError(
            f"output 0 of graph {graph.name}, {name}, comes from {made_by.op if made_by else 'an input'}",
            "logits that come straight from a linear",
            "make the LM head the last operator; the CPU backend has no kernel after it yet",
        )


PROGRAM = """\
// Generated from graph {name} ({hash}); one template call per operator. Do not edit: change the graph or the templates.
#include "entry.h"
{includes}
namespace {{
using namespace fs;

constexpr size_t kOffset[] = {{{offsets}}};  // bytes a row, times the padded row count
{helpers}
struct Program {{
  static constexpr size_t row_bytes = {row_bytes};
  static constexpr int layers = {layers};
  static constexpr size_t page_bytes = {page_bytes};
  static size_t scratch_bytes(int max_positions, int max_rows) {{ return {scratch}; }}
  static void move(char* layer, int n, const int32_t* src, const int32_t* dst) {{ {move}; }}
  template <class T>
  static T* buf(Ctx& c, int i) {{
    return reinterpret_cast<T*>(c.arena + kOffset[i] * (size_t(round_up(c.max_rows, 16)) + 16));
  }}
  static void run(Ctx& c, const FsStep& s, int tid) {{
{body}
  }}
}};
}}  // namespace

FS_ENTRY(Program)
{entry}
// Kept by kernels/cpu/facts.py: how many numbers follow, five sizes, the bytes of each weight.
extern "C" {{
extern const long long {symbol}[];
const long long {symbol}[] = {{{facts}}};
}}
"""

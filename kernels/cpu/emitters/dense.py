"""Dense decoders: embedding, norms, rotation, attention, products, element-by-element operators and views."""

from __future__ import annotations

from flexspec.errors import CompileError
from flexspec.graph import Node
from flexspec.kernels.cpu.emitter import Emit, Emitter
from flexspec.kernels.cpu.emitters.exchange import embedding_share
from flexspec.kernels.cpu.places import Place, row_count
from flexspec.kernels.expression import record_expression
from flexspec.ops.linear import group_parts


def _float(e: Emitter, name: str) -> str:
    return e.read(name, elem=False)


def _elem(e: Emitter, name: str) -> str:
    return e.read(name, elem=True)


def _vector(e: Emitter, *names: str) -> str:
    return e.weight("vector", names)


def _result(e: Emitter, node: Node) -> Place:
    name = node.outputs[0].name
    return e.allocate(name, elem=e.wants_elem(name))


def _in_place(e: Emitter, index: int, name: str, out: str) -> Place:
    """Storage for ``out``: that of ``name`` (float32) if nothing reads it any more, else new."""
    root, target = e.roots.root[name], e.roots.root[out]
    place = e.places.get(root, {}).get(False)
    if place is None or e.roots.last_use[root] > index:
        return e.allocate(out, elem=False)
    e.places.setdefault(target, {})[False] = place
    return place


def _kind(e: Emitter, place: Place) -> str:
    return e.elem if place.elem else "float"


def embedding(e: Emitter, at: int, node: Node) -> None:
    index, table = e.integers(node.inputs[0]), node.inputs[1]
    if node.attrs:  # first_row, rows
        embedding_share(e, node, index)
        return
    kinds, matrix = e.matrix("matrix", table)
    out = e.allocate(node.outputs[0].name, elem=False)
    e.call(f"embedding<{kinds}, {e.columns(table)}>(c, tid, s.T, {index}, {matrix}, {e.rows(out)})")


def rms_norm(e: Emitter, index: int, node: Node) -> None:
    x, w = node.inputs
    dims = node.outputs[0].type.dims
    heads, size = (1, dims[1]) if len(dims) == 2 else (dims[1], dims[2])
    source = _float(e, x)
    per_head = len(dims) == 3
    out = _in_place(e, index, x, node.outputs[0].name) if per_head else _result(e, node)
    operands = f"{source}, {_vector(e, w)}, {node.attr('eps')!r}f, {e.rows(out)}"
    e.call(f"rms_norm<{_kind(e, out)}, {size}>(c, tid, {row_count(e.graph, x)}, {heads}, {operands})")


def rope(e: Emitter, index: int, node: Node) -> None:
    from flexspec.ops.rope import rope_tables

    x, positions_T = node.inputs
    _, heads, size = node.outputs[0].type.dims
    assert isinstance(size, int)
    attrs = dict(node.attrs)
    positions = node.attr("max_positions")
    assert isinstance(positions, int)
    key = (f"rope[{size}]" + ",".join(f"{k}={v}" for k, v in node.attrs),)
    table = rope_tables(attrs, size, positions)
    cos, sin = e.weight("cos", key, table), e.weight("sin", key, table)
    source = _float(e, x)
    out = _in_place(e, index, x, node.outputs[0].name)
    e.call(f"rope<{size}>(c, tid, s.T, {heads}, {source}, {e.integers(positions_T)}, {cos}, {sin}, {e.rows(out)})")


def attention(e: Emitter, index: int, node: Node) -> None:
    q, k, v = node.inputs[:3]
    types = e.graph.types()
    heads, kv_heads, size = types[q].dims[1], types[k].dims[1], types[q].dims[2]
    shape = f"{e.elem}, {heads}, {kv_heads}, {size}"
    layer = len(e.layer_types)
    e.layer_types.append(shape)
    operands = ", ".join(_float(e, name) for name in (q, k, v))
    out = e.allocate(node.outputs[0].name, elem=True)
    # Writing K/V is row-local; the barrier inside the kernel separates it from the reads.
    target = e.rows(out, elem_type=True)
    e.call(f"attention<{shape}>(c, s, tid, c.kv_layer({layer}), {operands}, {target}, {node.attr('scale')!r}f)")
    e.row_local = False


def _bias(e: Emitter, names: tuple[str, ...]) -> str:
    return _vector(e, *names) if names else "nullptr"


def linear(e: Emitter, index: int, node: Node) -> None:
    x, w, *bias = node.inputs
    n, k = e.graph.types()[w].dims
    kinds, matrix = e.matrix("matrix", w)
    name = node.outputs[0].name
    if name == e.graph.outputs[0]:
        e.call(
            f"gemm_logits<{kinds}, {k}, {n}>(c, s, tid, {_elem(e, x)}, {matrix}, {_bias(e, tuple(bias))})",
            row_local=False,
        )
        return
    source = _elem(e, x)
    out = e.allocate(name, elem=False)
    epilogue = f"StoreRows{{{e.rows(out)}, {_bias(e, tuple(bias))}}}"
    e.call(
        f"gemm<{kinds}, {k}, {n}>(c, tid, {row_count(e.graph, x)}, {source}, {matrix}, {epilogue})",
        row_local=False,
    )


def linear_group(e: Emitter, index: int, node: Node) -> None:
    count, biased = node.attr("count"), node.attr("biased")
    assert isinstance(count, int) and isinstance(biased, bool)
    parts = group_parts(count, biased)
    weights = tuple(node.inputs[w] for w, _ in parts)
    biases = tuple(node.inputs[b] for _, b in parts if b is not None)
    widths = [e.columns(value.name) for value in node.outputs]
    source = _elem(e, node.inputs[0])
    joined = e.allocate(node.outputs[0].name, elem=False, columns=sum(widths))
    column = 0
    for value, columns in zip(node.outputs, widths, strict=True):
        e.places[e.roots.root[value.name]] = {False: Place(joined.buffer, False, joined.ld, column)}
        column += columns
    k = e.columns(weights[0])
    epilogue = f"StoreRows{{{e.rows(joined)}, {_bias(e, biases)}}}"
    kinds, matrix = e.matrix("matrix", *weights)
    e.call(f"gemm<{kinds}, {k}, {column}>(c, tid, s.T, {source}, {matrix}, {epilogue})", row_local=False)


def linear_swiglu(e: Emitter, index: int, node: Node) -> None:
    x, gate, up = node.inputs
    f, k = e.graph.types()[gate].dims
    source = _elem(e, x)
    out = e.allocate(node.outputs[0].name, elem=True)
    kinds, matrix = e.matrix("swiglu", gate, up)
    operands = f"{source}, {matrix}, {e.rows(out, elem_type=True)}"
    e.call(f"gemm_swiglu<{kinds}, {k}, {f}>(c, tid, {row_count(e.graph, x)}, {operands})", row_local=False)


def linear_add(e: Emitter, index: int, node: Node) -> None:
    x, w, residual, *bias = node.inputs
    n, k = e.graph.types()[w].dims
    kinds, matrix = e.matrix("matrix", w)
    source, addend = _elem(e, x), _float(e, residual)
    out = _in_place(e, index, residual, node.outputs[0].name)
    epilogue = f"AddRows{{{e.rows(out)}, {addend}, {_bias(e, tuple(bias))}}}"
    e.call(
        f"gemm<{kinds}, {k}, {n}>(c, tid, {row_count(e.graph, x)}, {source}, {matrix}, {epilogue})",
        row_local=False,
    )


def rowwise(e: Emitter, index: int, node: Node) -> None:
    if not 1 <= len(node.inputs) <= 2:
        raise CompileError(
            f"row-wise operator {node.op} has {len(node.inputs)} operands", "one or two", "split it in two"
        )
    sources = [_float(e, name) for name in node.inputs]
    out = _result(e, node)
    body = f"[](vf x0, vf x1) -> vf {{ (void)x0, (void)x1; return {record_expression(node)}; }}"
    shape = f"{row_count(e.graph, node.inputs[0])}, {e.columns(node.inputs[0])}"
    operands = f"{sources[0]}, {sources[-1]}, {e.rows(out)}, {body}"
    e.call(f"elementwise<{_kind(e, out)}>(c, tid, {shape}, {operands})")


def select_rows(e: Emitter, index: int, node: Node) -> None:
    x, _ = node.inputs
    source = _float(e, x)
    out = _result(e, node)
    e.call(
        f"select_rows<{_kind(e, out)}>(c, tid, s.L, {e.columns(x)}, {source}, s.logit_rows, {e.rows(out)})",
        row_local=False,
    )


def partition(e: Emitter, index: int, node: Node) -> None:
    """A rank's columns of a value, copied: in-place operators on them must not touch the other columns."""
    (x,) = node.inputs
    dim, first = node.attr("dim"), node.attr("first")
    dims = e.graph.types()[x].dims
    assert isinstance(dim, int) and isinstance(first, int)
    if dim != 1:
        raise CompileError(f"a partition along dim {dim}", "dim 1", "cut the model elsewhere")
    inner = e.columns(x) // int(dims[1])  # after the dim that is cut
    out = _result(e, node)
    rows = _float(e, x)
    source = f"Rows<float>{{{rows}.p + {first * inner}, {rows}.ld}}"
    shape = f"{row_count(e.graph, x)}, {e.columns(node.outputs[0].name)}"
    e.call(f"copy_rows<float, {_kind(e, out)}>(c, tid, {shape}, {source}, {e.rows(out)})")


def view(e: Emitter, index: int, node: Node) -> None:
    """Storage is shared with the operand: nothing to do."""


EMITTERS: dict[str, Emit] = {
    "embedding": embedding,
    "rms_norm": rms_norm,
    "rope": rope,
    "attention": attention,
    "linear": linear,
    "linear_group": linear_group,
    "linear_swiglu": linear_swiglu,
    "linear_add": linear_add,
    "rowwise": rowwise,
    "select_rows": select_rows,
    "view": view,
    "partition": partition,
}

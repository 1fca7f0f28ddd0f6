"""Rules of torch operators that compute: norms, rotations, linears, attention, the gated unit, residuals.

A pattern of several operators is recognised one operator at a time: each rule takes a term one step further (x, x^2,
mean(x^2), ... rms_norm), so that order, casts and views between the steps do not matter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from flexspec.compiler.frontends.torch_mlir.terms import (
    Kind,
    Scalar,
    Scope,
    Shape,
    Summand,
    Term,
    Unmatched,
    changed,
    expect,
)
from flexspec.compiler.frontends.torch_mlir.views import RULES, as_heads, as_rows, rule, term

__all__ = ["RULES"]

_FREE = "1FN"  # letters that broadcast with any dim
_ROTATED = frozenset({Summand(1, "x", "cos"), Summand(1, "rot", "sin")})
_ROTATED_LO = frozenset({Summand(1, "lo", "cos"), Summand(-1, "hi", "sin")})
_ROTATED_HI = frozenset({Summand(1, "hi", "cos"), Summand(1, "lo", "sin")})
_MINUS_HI, _LO = frozenset({Summand(-1, "hi")}), frozenset({Summand(1, "lo")})


def broadcast(a: Term, b: Term, shape: Shape) -> str:
    """Letters of the result of an element-wise operator. Raises Unmatched if dims do not match."""
    out = ""
    for x, y in zip(a.axes.rjust(len(shape), "1"), b.axes.rjust(len(shape), "1"), strict=True):
        fits = x == y or x in _FREE or y in _FREE
        expect(fits, f"{a} with dims {a.axes} and {b} with dims {b.axes}", "operands whose dims match")
        out += y if x in _FREE else x
    return out


@rule("aten.pow.Tensor_Scalar", "aten.square")
def square(scope: Scope, args: list[Any], shape: Shape) -> Term:
    del scope, shape
    x = term(args[0])
    power = args[1] if len(args) > 1 else 2
    if x.kind is Kind.MEAN_SQUARE_EPS and power in (-0.5, 0.5):
        return changed(x, kind=Kind.INV_RMS if power < 0 else Kind.RMS)
    expect(x.kind is Kind.VALUE and power == 2, f"{x} to the power {power}", "x^2 of an RMSNorm")
    return changed(x, kind=Kind.SQUARE)


@rule("aten.mean.dim")
def mean(scope: Scope, args: list[Any], shape: Shape) -> Term:
    del scope
    x, dims, keep, *_ = args
    last = dims in ([-1], [len(x.axes) - 1]) and keep is True
    expect(x.kind is Kind.SQUARE and last, f"mean of {x} over dims {dims}", "mean(x^2) over the last dim, keepdim")
    return changed(x, kind=Kind.MEAN_SQUARE, axes=x.axes[:-1] + "1", shape=shape)


@rule("aten.rsqrt")
def root(scope: Scope, args: list[Any], shape: Shape) -> Term:
    del scope, shape
    x = term(args[0])
    expect(x.kind is Kind.MEAN_SQUARE_EPS, x, "mean(x^2) + eps of an RMSNorm")
    return changed(x, kind=Kind.INV_RMS)


@rule("aten.sqrt")
def square_root(scope: Scope, args: list[Any], shape: Shape) -> Term:
    return changed(root(scope, args, shape), kind=Kind.RMS)


@rule("aten.reciprocal")
def reciprocal(scope: Scope, args: list[Any], shape: Shape) -> Term:
    del scope, shape
    expect(term(args[0]).kind is Kind.RMS, args[0], "sqrt(mean(x^2) + eps) of an RMSNorm")
    return changed(args[0], kind=Kind.INV_RMS)


@rule("aten.div.Tensor", "aten.div.Scalar")
def divide(scope: Scope, args: list[Any], shape: Shape) -> Term:
    a, b = args[:2]
    if isinstance(b, Term) and b.kind is Kind.RMS:
        return multiply(scope, [a, changed(b, kind=Kind.INV_RMS)], shape)
    if isinstance(a, Term) and a.kind in (Kind.POSITIONS, Kind.TABLE) and isinstance(b, Term) and b.const is not None:
        return multiply(scope, [a, changed(b, const=1.0 / b.const)], shape)
    raise Unmatched(f"{a} / {b}", "x / sqrt(mean(x^2) + eps), or positions / frequencies")


@rule("aten.rms_norm")
def rms_norm(scope: Scope, args: list[Any], shape: Shape) -> Term:
    x, dims, weight, eps = args
    expect(
        len(dims) == 1 and weight is not None, f"rms_norm over dims {dims} without a weight", "the last dim, a weight"
    )
    if eps is None:  # torch's default
        import torch

        eps = torch.finfo({2: torch.bfloat16, 4: torch.float32}[scope.dtype.size_bytes]).eps
    return _weighted(scope, changed(x, kind=Kind.NORMED, eps=eps), weight, shape)


def _weighted(scope: Scope, x: Term, weight: Term, shape: Shape) -> Term:
    letter = x.axes[-1]
    flat = weight.core == "N" and weight.axes[-1] == "N" and letter in "CD"
    expect(flat, f"{x} times a weight with dims {weight.axes}", "a norm over the last dim, its weight along that dim")
    rank = len(x.value.type.dims)
    expect((letter == "C") == (rank == 2), x, "a norm over the hidden size or the head dim")
    return Term(Kind.VALUE, x.axes, shape, scope.emit("rms_norm", [x.value, weight.value], {"eps": x.eps}))


@rule("aten.add.Tensor", "aten.add.Scalar")
def add(scope: Scope, args: list[Any], shape: Shape) -> Term:
    a, b, *alpha = args
    expect(alpha in ([1], []), f"add with alpha={alpha}", "a plain sum")
    known = b.const if isinstance(b, Term) else None
    eps = known.item() if known is not None and known.numel() == 1 else b
    if isinstance(a, Term) and a.kind is Kind.MEAN_SQUARE and isinstance(eps, float | int):
        return changed(a, kind=Kind.MEAN_SQUARE_EPS, eps=float(eps))
    a, b = term(a, "an addend that is a tensor"), term(b, "two tensors (no constant can be added)")
    axes = broadcast(a, b, shape)
    if a.kind is Kind.ROTARY and b.kind is Kind.ROTARY:
        return _sum_parts(scope, a, b, axes, shape)
    if Kind.WEIGHT in (a.kind, b.kind):
        return _biased(scope, a, b, shape)
    both = a.kind is Kind.VALUE and b.kind is Kind.VALUE and a.core == b.core and a.shape[-1] == b.shape[-1]
    expect(both, f"{a} + {b}", "two values of the same dims (a residual), or the parts of a rotation")
    first, second = sorted((a.value, b.value), key=scope.level)  # the residual first, then what was computed from it
    return Term(Kind.VALUE, axes, shape, scope.emit("add", [first, second]))


@rule("aten.sub.Tensor")
def subtract(scope: Scope, args: list[Any], shape: Shape) -> Term:
    a, b, *alpha = args
    expect(isinstance(b, Term) and b.kind is Kind.ROTARY, f"{a} - {b}", "lo * cos - hi * sin of a rotation")
    return add(scope, [a, negate(scope, [b], b.shape), *alpha], shape)


@rule("aten.neg")
def negate(scope: Scope, args: list[Any], shape: Shape) -> Term:
    del scope, shape
    x = term(args[0])
    expect(x.kind is Kind.ROTARY, f"-({x})", "the negated half of a rotation")
    return changed(x, parts=frozenset(replace(part, sign=-part.sign) for part in x.parts))


def _biased(scope: Scope, a: Term, b: Term, shape: Shape) -> Term:
    x, bias = (b, a) if a.kind is Kind.WEIGHT else (a, b)
    operands = scope.linear_of(x.value) if x.kind is Kind.VALUE and x.core == "TC" else None
    fits = operands is not None and bias.axes.endswith("N") and bias.core == "N"
    expect(fits, f"{a} + {b}", "a bias added to the result of a linear")
    assert operands is not None
    return Term(Kind.VALUE, x.axes, shape, scope.emit("linear", [*operands, bias.value]))


def _sum_parts(scope: Scope, a: Term, b: Term, axes: str, shape: Shape) -> Term:
    once = a.base == b.base and not a.parts & b.parts
    expect(once, f"{a} and {b}", "the summands of one rotation of one value, each once")
    x = changed(a, axes=axes, shape=shape, parts=a.parts | b.parts)
    return _rotation(scope, x) if x.parts == _ROTATED else x


def _rotation(scope: Scope, x: Term) -> Term:
    """rope, once all summands are present."""
    return Term(Kind.VALUE, x.axes, x.shape, scope.emit_rope(x.value))


@rule("aten.cat")
def concatenate(scope: Scope, args: list[Any], shape: Shape) -> Term:
    pieces, dim = args
    rank = len(shape)
    expect(len(pieces) == 2 and dim % rank == rank - 1, f"{len(pieces)} tensors joined in dim {dim}", "two, last dim")
    a, b = pieces
    if a.kind in (Kind.ANGLES, Kind.TABLE) and a == b and a.scale == b.scale:
        return changed(a, shape=shape)
    expect(
        a.kind is Kind.ROTARY and b.kind is Kind.ROTARY and a.base == b.base,
        f"cat({a}, {b})",
        "halves of one value",
    )
    x = changed(a, shape=shape)
    if (a.parts, b.parts) == (_MINUS_HI, _LO):
        return changed(x, parts=frozenset({Summand(1, "rot")}))
    rotated = (a.parts, b.parts) == (_ROTATED_LO, _ROTATED_HI)
    expect(rotated, f"cat of {_show(a)} and {_show(b)}", "cat(lo cos - hi sin, hi cos + lo sin) or cat(-hi, lo)")
    return _rotation(scope, x)


def _show(x: Term) -> str:
    return " ".join(f"{'-' if p.sign < 0 else '+'}{p.piece} {p.table}".strip() for p in sorted(x.parts, key=str))


@rule("aten.mul.Tensor", "aten.mul.Scalar")
def multiply(scope: Scope, args: list[Any], shape: Shape) -> Term:
    a, b = args
    if not isinstance(a, Term):
        a, b = b, a
    if not isinstance(b, Term):
        expect(a.kind is Kind.TABLE and isinstance(b, float | int), f"{a} * {b}", "a factor on cos and sin")
        expect(b == 1 or a.scale is not None, f"{a} times {b}", "tables passed or stored with that factor")
        return changed(a, scale=None if a.scale is None else a.scale * b)
    axes = broadcast(a, b, shape)
    pair = {a.kind: a, b.kind: b}
    kinds = set(pair)
    if kinds == {Kind.VALUE} and a.base == b.base and a.axes == b.axes:
        return changed(a, kind=Kind.SQUARE)
    if kinds == {Kind.VALUE, Kind.INV_RMS} and a.base == b.base:
        value, inverse = pair[Kind.VALUE], pair[Kind.INV_RMS]
        aligned = value.axes[:-1] == inverse.axes[:-1]
        expect(aligned, f"{value} times {inverse}", "the same dims")
        return changed(value, kind=Kind.NORMED, eps=inverse.eps)
    if kinds == {Kind.NORMED, Kind.WEIGHT}:
        return _weighted(scope, pair[Kind.NORMED], pair[Kind.WEIGHT], shape)
    if kinds == {Kind.VALUE, Kind.SIGMOID} and a.base == b.base and a.axes == b.axes:
        return changed(pair[Kind.VALUE], kind=Kind.SILU)
    if kinds == {Kind.SILU, Kind.VALUE} and a.axes == b.axes:
        return Term(Kind.VALUE, axes, shape, scope.emit("swiglu", [pair[Kind.SILU].value, pair[Kind.VALUE].value]))
    if kinds == {Kind.POSITIONS, Kind.CONST}:
        return _angles(pair[Kind.POSITIONS], pair[Kind.CONST], shape)
    if Kind.TABLE in kinds and kinds & {Kind.VALUE, Kind.ROTARY} and len(kinds) == 2:
        other = pair.get(Kind.VALUE) or pair[Kind.ROTARY]
        return _times_table(scope, other, pair[Kind.TABLE], shape)
    raise Unmatched(f"{a} * {b}", "a step of RMSNorm, of a rotation or of silu(gate) * up")


def _times_table(scope: Scope, x: Term, table: Term, shape: Shape) -> Term:
    x = as_heads(scope, x)
    axes = broadcast(x, table, shape)
    expect(x.axes[-1] == "D" and "T" in table.axes, f"{x} * {table}", "a value [T,H,D] times cos or sin of its rows")
    expect(axes.rjust(len(shape), "1") == x.axes.rjust(len(shape), "1"), f"{x} * {table}", "a table along T and D")
    parts = x.parts if x.kind is Kind.ROTARY else frozenset({Summand(1, "x")})
    expect(all(not part.table for part in parts), f"{x} times a second table", "cos or sin once")
    head_dim = x.value.type.dims[-1]
    assert isinstance(head_dim, int)
    scope.check_table(table, head_dim)
    marked = frozenset(replace(part, table=table.table) for part in parts)
    return Term(Kind.ROTARY, axes, shape, x.value, parts=marked)


def _angles(positions: Term, const: Term, shape: Shape) -> Term:
    """positions x inverse frequencies, as product, matmul or outer product: T is the dynamic dim of the shape."""
    assert const.const is not None
    flat = const.const.reshape(-1)
    sizes = [n for n in shape if n != 1]
    fits = positions.core == "T" and sorted(sizes, key=str) == sorted([None, flat.numel()], key=str)
    expect(fits, f"{positions} times {const}", "positions times one row of inverse frequencies")
    axes = "".join("1" if n == 1 else "T" if n is None else "F" for n in shape)
    return Term(Kind.ANGLES, axes, shape, const=flat)


@rule("aten.einsum")
def einsum(scope: Scope, args: list[Any], shape: Shape) -> Term:
    equation = args[0].replace(" ", "")
    outer_product = len(equation) == 6 and equation[1] == "," and equation[4:] == equation[0] + equation[2]
    expect(outer_product or equation in ("i,j->ij", "t,d->td"), f"einsum {args[0]!r}", "an outer product, i,j->ij")
    return matmul(scope, args[1], shape)


@rule("aten.cos")
def cosine(scope: Scope, args: list[Any], shape: Shape) -> Term:
    del scope, shape
    expect(term(args[0]).kind is Kind.ANGLES, args[0], "the angles of a rotation, positions x inverse frequencies")
    return changed(args[0], kind=Kind.TABLE, table="cos", scale=1.0)


@rule("aten.sin")
def sine(scope: Scope, args: list[Any], shape: Shape) -> Term:
    return changed(cosine(scope, args, shape), table="sin")


@rule("aten.embedding", "aten.index.Tensor", "aten.index_select")
def gather(scope: Scope, args: list[Any], shape: Shape) -> Term:
    """Rows of a constant cos or sin table by position."""
    const, index = args[0], args[-1] if len(args) == 3 and isinstance(args[1], int) else args[1]
    index = index[0] if isinstance(index, list) else index
    fits = (
        isinstance(index, Term) and index.kind is Kind.POSITIONS and isinstance(const, Term) and len(const.shape) == 2
    )
    expect(fits and const.kind is Kind.CONST, f"{index} of {const}", "positions that pick rows of a cos or sin table")
    name, width = scope.table_of(const.const)
    return Term(Kind.TABLE, index.axes + "F", shape, table=name, ready=True)


@rule("aten.arange", "aten.arange.start", "aten.arange.start_step")
def arange(scope: Scope, args: list[Any], shape: Shape) -> Term:
    del scope
    numbers = [x for x in args if isinstance(x, int | Scalar) and not isinstance(x, bool)]
    expect(Scalar.ROWS in numbers[:2] and numbers[0] in (0, Scalar.ROWS), f"arange({args})", "arange(T): positions")
    return Term(Kind.POSITIONS, "T", shape)


@rule("aten.linear")
def linear(scope: Scope, args: list[Any], shape: Shape) -> Term:
    x, weight, bias = args
    rows = as_rows(scope, x)
    expect(
        weight.kind is Kind.WEIGHT and weight.axes == "NK",
        f"linear with {weight}",
        "a weight [N,K] as it is stored",
    )
    operands = [rows, weight.value, *([] if bias is None else [bias.value])]
    return Term(Kind.VALUE, x.axes[:-1] + "C", shape, scope.emit("linear", operands))


@rule("aten.matmul", "aten.mm", "aten.bmm", "aten.outer", "aten.ger")
def matmul(scope: Scope, args: list[Any], shape: Shape) -> Term:
    a, b = args
    pair = {a.kind: a, b.kind: b}
    if set(pair) == {Kind.POSITIONS, Kind.CONST}:
        return _angles(pair[Kind.POSITIONS], pair[Kind.CONST], shape)
    fits = a.kind is Kind.VALUE and b.kind is Kind.WEIGHT and b.axes == "KN"
    expect(fits, f"{a} @ {b}", "x @ weight.T with a weight [N,K], or positions @ frequencies")
    return linear(scope, [a, changed(b, axes="NK"), None], shape)


@rule("aten.scaled_dot_product_attention")
def attention(scope: Scope, args: list[Any], shape: Shape) -> Term:
    q, k, v, mask, dropout, causal, scale, grouped = args
    expect(mask is None and causal is True, f"attn_mask={mask}, is_causal={causal}", "attn_mask=None, is_causal=True")
    expect(dropout == 0.0, f"dropout_p={dropout}", "dropout_p=0.0")
    q, k, v = (as_heads(scope, x) for x in (q, k, v))
    expect(q.kind is Kind.VALUE and q.core in ("HTD", "TD"), f"query {q} with dims {q.axes}", "[H,T,D], heads first")
    heads, head_dim = q.value.type.dims[1:]
    for name, x in (("key", k), ("value", v)):
        ordered = x.kind is Kind.VALUE and x.core in ("HTD", "QTD", "RTD", "TD")
        expect(ordered, f"{name} {x} with dims {x.axes}", "[G,T,D], heads first")
        kv_heads = x.value.type.dims[1]
        seen = math.prod(n for letter, n in zip(x.axes, x.shape, strict=True) if letter in "HQR" and n is not None)
        fits = seen == heads or (kv_heads == seen and (grouped is True or kv_heads == 1))
        expect(fits, f"{name} with {seen} heads for {heads} query heads", "enable_gqa=True, or kv heads repeated")
    assert isinstance(head_dim, int)
    out = scope.emit_attention(q.value, k.value, v.value, float(scale) if scale is not None else head_dim**-0.5)
    return Term(Kind.VALUE, q.axes, shape, out)


@rule("aten.silu")
def silu(scope: Scope, args: list[Any], shape: Shape) -> Term:
    del scope, shape
    expect(term(args[0]).kind is Kind.VALUE, args[0], "silu of a value")
    return changed(args[0], kind=Kind.SILU)


@rule("aten.sigmoid")
def sigmoid(scope: Scope, args: list[Any], shape: Shape) -> Term:
    return changed(silu(scope, args, shape), kind=Kind.SIGMOID)

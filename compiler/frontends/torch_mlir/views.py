"""Rules of torch operators that only move or rename dims: views, permutations, slices, repeats, casts.

Each follows a term's letters; a view that splits or joins heads becomes ``split_heads`` or ``merge_heads``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flexspec.compiler.frontends.torch_mlir.terms import (
    END,
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
from flexspec.graph import Value

Rule = Callable[[Scope, list[Any], Shape], Any]
RULES: dict[str, Rule] = {}
_Rule = TypeVar("_Rule", bound=Rule)


def rule(*names: str) -> Callable[[_Rule], _Rule]:
    """Register a rule for operators such as ``aten.view``; it gets the scope, the operands and the result's shape."""

    def register(function: _Rule) -> _Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def term(x: Any, expected: str = "a tensor") -> Term:
    """``x`` as a Term. Raises Unmatched."""
    if not isinstance(x, Term):
        raise Unmatched(str(x), expected)
    return x


def as_heads(scope: Scope, x: Term) -> Term:
    """[T,C] as one head [T,1,C], which is how programs with a single kv head view it."""
    if x.kind is not Kind.VALUE or "C" not in x.axes:
        return x
    return changed(x, base=scope.emit("split_heads", [x.value], {"heads": 1}), axes=x.axes.replace("C", "D"))


def as_rows(scope: Scope, x: Term) -> Value:
    """The canonical [T,C] behind a term. Raises Unmatched unless it is rows of channels."""
    expected = "a value of rows and channels, [T,C] or [1,T,C]"
    expect(x.kind is Kind.VALUE and x.axes[-1] != "1", x, expected)
    if x.core == "TD" and x.value.type.dims[1] == 1:
        return scope.emit("merge_heads", [x.value])
    expect(x.core == "TC", f"{x} with dims {x.axes}", expected)
    return x.value


@rule(
    "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten._to_copy", "aten.type_as",
    "aten.contiguous", "aten.clone", "aten.detach", "aten.alias", "aten.lift_fresh_copy",
)  # fmt: skip
def same(scope: Scope, args: list[Any], shape: Shape) -> Term:
    """Copies and casts. Where to round is up to the backends: a canonical graph has one dtype."""
    del scope, shape
    return term(args[0])


@rule("aten.dropout")
def dropout(scope: Scope, args: list[Any], shape: Shape) -> Term:
    expect(args[1] == 0 or args[2] is False, f"dropout(p={args[1]}) in training", "inference: call module.eval()")
    return same(scope, args, shape)


@rule("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten.using_ints", "aten.unflatten.int",
      "aten.view_as", "aten.squeeze", "aten.squeeze.dim", "aten.squeeze.dims", "aten.select.int")  # fmt: skip
def view(scope: Scope, args: list[Any], shape: Shape) -> Term:
    """A view is recognised by the shape of its result."""
    x = term(args[0])
    named = [(letter, n) for letter, n in zip(x.axes, x.shape, strict=True) if letter != "1"]
    core, sizes = "".join(letter for letter, _ in named), [n for _, n in named]
    wanted = [n for n in shape if n != 1]
    base = x.base
    if sizes != wanted:
        core, base = _split_or_merge(scope, x, core, sizes, wanted)
    letters = iter(core)
    axes = "".join("1" if n == 1 else next(letters) for n in shape)
    return changed(x, axes=axes, shape=shape, base=base)


def _split_or_merge(scope: Scope, x: Term, core: str, sizes: list[Any], wanted: list[Any]) -> tuple[str, Value]:
    refusal = f"{x} with dims {x.axes} seen as {['T' if n is None else n for n in wanted]}"
    expect(x.kind is Kind.VALUE, refusal, "a view that splits or joins heads of a value")
    if core == "TC" and len(wanted) == 3 and wanted[0] is None and wanted[1] * wanted[2] == sizes[1]:
        return "THD", scope.emit("split_heads", [x.value], {"heads": wanted[1]})
    if core == "THD" and wanted == [None, sizes[1] * sizes[2]]:
        return "TC", scope.emit("merge_heads", [x.value])
    if "HR" in core:  # repeated kv heads: [.., G, n, ..] -> [.., G*n, ..]
        at = core.index("HR")
        if wanted == [*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :]]:
            return core.replace("HR", "Q"), x.value
    raise Unmatched(refusal, "[T, H*D] split into [T,H,D], joined again with rows first, or kv heads repeated in place")


def _reordered(x: Term, order: Sequence[int]) -> Term:
    return changed(x, axes="".join(x.axes[i] for i in order), shape=tuple(x.shape[i] for i in order))


@rule("aten.transpose.int", "aten.swapaxes")
def transpose(scope: Scope, args: list[Any], shape: Shape) -> Term:
    del scope, shape
    x, a, b = args
    order = list(range(len(x.axes)))
    order[a], order[b] = order[b], order[a]
    return _reordered(x, order)


@rule("aten.t", "aten.numpy_T", "aten.mT")
def matrix_transpose(scope: Scope, args: list[Any], shape: Shape) -> Term:
    rank = len(args[0].axes)
    expect(rank == 2, args[0], "a matrix")
    return transpose(scope, [args[0], 0, 1], shape)


@rule("aten.permute")
def permute(scope: Scope, args: list[Any], shape: Shape) -> Term:
    del scope, shape
    x = term(args[0])
    return _reordered(x, [d % len(x.axes) for d in args[1]])


@rule("aten.unsqueeze")
def unsqueeze(scope: Scope, args: list[Any], shape: Shape) -> Term:
    del scope
    x, dim = args
    at = dim % len(shape)
    return changed(x, axes=x.axes[:at] + "1" + x.axes[at:], shape=shape)


@rule("aten.expand", "aten.expand_as", "aten.broadcast_to")
def expand(scope: Scope, args: list[Any], shape: Shape) -> Term:
    """A new size for the unit dim right after the heads: each kv head repeated."""
    del scope
    x = term(args[0])
    axes = "1" * (len(shape) - len(x.axes)) + x.axes
    old = (1,) * (len(shape) - len(x.axes)) + x.shape
    for i, (before, after) in enumerate(zip(old, shape, strict=True)):
        if before != after:
            repeat = x.kind is Kind.VALUE and after is not None and "R" not in axes
            expect(repeat, f"{x} expanded to {after or 'T'} in dim {i}", "kv heads repeated, [.., G, 1, ..] expanded")
            axes = axes[:i] + "R" + axes[i + 1 :]
    return changed(x, axes=axes, shape=shape)


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(scope: Scope, args: list[Any], shape: Shape) -> Term:
    del scope
    x, _, dim, *_ = args
    letter = x.axes[dim] if x.kind is Kind.VALUE and dim is not None else ""
    expect(letter in ("H", "1"), f"{x} repeated along dim {dim}", "kv heads repeated along the heads")
    at = dim % len(x.axes)
    return changed(x, axes=x.axes[:at] + ("Q" if letter == "H" else "R") + x.axes[at + 1 :], shape=shape)


@rule("aten.slice.Tensor")
def take_slice(scope: Scope, args: list[Any], shape: Shape) -> Term:
    x, dim, start, end, step = args
    dim, start, size = dim % len(x.axes), start or 0, x.shape[dim]
    expect(step == 1, f"a slice with step {step}", "halves of the head dim (pairs d, d + D/2), or everything")
    if start == 0 and (end is None or end in (END, size) or (end is Scalar.ROWS and size is None)):
        return term(x)
    if x.kind is Kind.CONST and dim == 0 and start == 0 and end is Scalar.ROWS and len(x.axes) == 2:
        name, width = scope.table_of(x.const)
        return Term(Kind.TABLE, "TF", (None, width), table=name, ready=True)
    even = isinstance(size, int) and size % 2 == 0
    expect(even and dim == len(x.axes) - 1, f"{x} sliced in dim {dim}", "a slice of the last dim")
    assert isinstance(size, int)
    bounds = (start % size if start else 0, size if end is None or end == END else end)
    halves = {(0, size // 2): "lo", (size // 2, size): "hi"}
    expect(bounds in halves, f"elements {bounds[0]} to {bounds[1]} of {size}", "one half of the head dim")
    return _half(scope, x, halves[bounds], shape)


def _half(scope: Scope, x: Term, piece: str, shape: Shape) -> Term:
    if x.kind is Kind.TABLE or x.kind is Kind.ANGLES:
        width = 2 * x.const.numel() if x.const is not None else x.shape[-1]
        expect(x.shape[-1] == width, f"half of {x}", "a half of a table that holds every frequency twice")
        return changed(x, shape=shape)
    x = as_heads(scope, x)
    expect(x.kind is Kind.VALUE and x.axes[-1] == "D", f"{x} cut in half", "halves of the head dim, [T,H,D]")
    return changed(x, kind=Kind.ROTARY, parts=frozenset({Summand(1, piece)}), shape=shape)


def _halves(scope: Scope, x: Term, dim: int, halved: bool, how: object) -> list[Term]:
    expect(dim % len(x.axes) == len(x.axes) - 1, f"{x} split in dim {dim}", "a split of the last dim")
    expect(halved, f"{x} split by {how}", "two halves of the head dim")
    size = x.shape[-1]
    assert size is not None
    half_shape = (*x.shape[:-1], size // 2)
    return [_half(scope, x, "lo", half_shape), _half(scope, x, "hi", half_shape)]


@rule("aten.chunk", "aten.tensor_split.sections")
def chunk(scope: Scope, args: list[Any], shape: Shape) -> list[Term]:
    del shape
    x, count, dim = args
    return _halves(scope, x, dim, count == 2 and x.shape[dim] is not None and x.shape[dim] % 2 == 0, f"{count} chunks")


@rule("aten.split.Tensor")
def split(scope: Scope, args: list[Any], shape: Shape) -> list[Term]:
    del shape
    x, size, dim = args
    return _halves(scope, x, dim, x.shape[dim] == 2 * size, f"{size} elements")


@rule("aten.split_with_sizes", "aten.split.sizes")
def split_with_sizes(scope: Scope, args: list[Any], shape: Shape) -> list[Term]:
    del shape
    x, sizes, dim = args
    return _halves(scope, x, dim, len(sizes) == 2 and sizes[0] == sizes[1], f"sizes {sizes}")

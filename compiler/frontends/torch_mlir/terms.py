"""What the torch-mlir frontend knows of a traced value while it raises a program to canonical operators.

Owns ``Term`` (a value in the making, with a letter for each torch dim) and ``Scope`` (the graph being raised). The
rules that turn torch operators into terms are in ``rules.py`` and ``views.py``.

Letters: T rows, C channels [T,C], H heads and D head dim [T,H,D], R a repeat of its kv head, Q heads repeated from kv
heads, F pairs or channels of rotary tables, N and K of weights, 1 a dim of size one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from flexspec.builder import GraphBuilder, StepInputs
from flexspec.compiler.passes.dead_values import dead_values
from flexspec.graph import Attr, Graph, Value
from flexspec.ops.rope import RopeConfig, inverse_frequencies, rope_tables
from flexspec.types import DType, Role

if TYPE_CHECKING:
    import torch

Shape = tuple[int | None, ...]  # None is T, the only dynamic dim
END = 2**63 - 1  # torch's "to the end" of a slice
_TABLE_TOLERANCE = 1e-5


class Unmatched(Exception):
    """A rule cannot raise its operator. The walker adds the operator and the source line."""

    def __init__(self, found: str, expected: str) -> None:
        self.found, self.expected = found, expected
        super().__init__(found)


class Scalar(Enum):
    """Integers known only at run time."""

    ROWS = "T"
    OTHER = "a number known at run time"


class Kind(Enum):
    """What a term is, as its error messages say it."""

    VALUE = "a value"
    WEIGHT = "a weight"
    CONST = "a constant"
    POSITIONS = "positions"
    ANGLES = "rotary angles"
    TABLE = "a rotary table"
    SQUARE = "x^2"
    MEAN_SQUARE = "mean(x^2)"
    MEAN_SQUARE_EPS = "mean(x^2) + eps"
    RMS = "sqrt(mean(x^2) + eps)"
    INV_RMS = "rsqrt(mean(x^2) + eps)"
    NORMED = "x * rsqrt(mean(x^2) + eps)"
    SIGMOID = "sigmoid(x)"
    SILU = "silu(x)"
    ROTARY = "part of a rotation"


@dataclass(frozen=True, slots=True)
class Summand:
    """One summand of a rotation: ``sign * piece(x) * table``."""

    sign: int
    piece: str  # "x", its halves "lo" and "hi", or "rot", which is cat(-hi, lo)
    table: str = ""  # "cos", "sin" or none yet


@dataclass(frozen=True, slots=True)
class Term:
    """A traced value on its way to a canonical one. Fields from ``eps`` on belong to some kinds only."""

    kind: Kind
    axes: str  # a letter for each torch dim
    shape: Shape
    base: Value | None = None  # the canonical value it is derived from
    eps: float = 0.0
    parts: frozenset[Summand] = frozenset()
    table: str = ""  # TABLE: cos or sin
    const: torch.Tensor | None = field(default=None, compare=False)  # CONST: its value; ANGLES: inverse frequencies
    scale: float | None = field(default=None, compare=False)  # TABLE: factor on cos and sin, None if not visible
    ready: bool = False  # TABLE: an argument or already checked, so there are no frequencies to check

    @property
    def core(self) -> str:
        """The letters without dims of size one."""
        return self.axes.replace("1", "")

    @property
    def value(self) -> Value:
        assert self.base is not None
        return self.base

    def __str__(self) -> str:
        dims = ",".join("T" if n is None else str(n) for n in self.shape)
        return f"{self.kind.value} [{dims}]"


def changed(x: Term, **fields: Any) -> Term:
    """``x`` with other fields."""
    return replace(x, **fields)


def expect(ok: bool, found: object, expected: str) -> None:
    """Raise Unmatched unless ``ok``."""
    if not ok:
        raise Unmatched(str(found), expected)


@dataclass(slots=True)
class Scope:
    """The graph being raised. Equal calls are emitted once, as someone using the builder would write them."""

    b: GraphBuilder
    step: StepInputs
    rope: RopeConfig
    max_positions: int
    prefix: str
    _calls: dict[object, tuple[Value, ...]] = field(default_factory=dict)
    _levels: dict[str, int] = field(default_factory=dict)
    _linears: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    caches: list[Value] = field(default_factory=list)

    @property
    def dtype(self) -> DType:
        return self.b.dtype

    def emit(self, op: str, operands: Sequence[Value], attrs: Mapping[str, Attr] | None = None) -> Value:
        """The first output of a canonical operator."""
        key = (op, tuple(v.name for v in operands), tuple(sorted((attrs or {}).items())))
        if key not in self._calls:
            self._note(key, operands, self.b.call(op, operands, attrs))
            if op == "linear" and len(operands) == 2:
                self._linears[self._calls[key][0].name] = tuple(operands)
        return self._calls[key][0]

    def emit_rope(self, x: Value) -> Value:
        """rope(x) with the configured rotation."""
        key = ("rope", x.name)
        if key not in self._calls:
            out = self.b.rope(x, self.step.positions_T, self.rope, self.max_positions)
            self._note(key, (x,), (out,))
        return self._calls[key][0]

    def emit_attention(self, q: Value, k: Value, v: Value, scale: float) -> Value:
        """The block's only attention, over its paged caches."""
        expect(not self.caches, "a second attention", "one attention in a block: import one layer at a time")
        heads, head_dim = k.type.dims[1:]
        assert isinstance(heads, int) and isinstance(head_dim, int)
        pools = [self.b.kv_cache(f"{self.prefix}.{kind}_cache", heads, head_dim) for kind in "kv"]
        out, *new = self.b.attention(q, k, v, pools[0], pools[1], self.step, scale)
        self.caches += new
        self._note(("attention",), (q, k, v), (out, *new))
        return out

    def level(self, value: Value) -> int:
        """The longest path of operators from the inputs."""
        return self._levels.get(value.name, 0)

    def linear_of(self, value: Value) -> tuple[Value, ...] | None:
        """x and weight if ``value`` is a linear without a bias."""
        return self._linears.get(value.name)

    def table_of(self, const: torch.Tensor) -> tuple[str, int]:
        """("cos" or "sin", width) of a constant [positions, width] that is a table of the configured rotation."""
        rows, width = const.shape
        for head_dim in (width, 2 * width):
            if head_dim % 2 == 0:
                for name, half in zip(("cos", "sin"), rope_tables(self._rope_attrs(), head_dim, rows), strict=True):
                    table = np.concatenate([half, half], 1) if head_dim == width else half
                    if np.allclose(const.float().numpy(), table, atol=1e-4):
                        return name, width
        raise Unmatched(f"a constant of shape {list(const.shape)}", f"cos or sin of {self.rope}, half-split")

    def check_table(self, table: Term, head_dim: int) -> None:
        """Raise Unmatched unless a table that the program computes is that of the configured rotation."""
        if table.ready:
            return
        inverse, scale = inverse_frequencies(self._rope_attrs(), head_dim)
        assert table.const is not None and table.scale is not None
        frequencies = table.const.float().numpy()
        same = frequencies.shape == inverse.shape and np.allclose(frequencies, inverse, rtol=1e-4)
        expect(same, f"frequencies {_few(frequencies)}", f"{_few(inverse)}, those of {self.rope}")
        close = math.isclose(table.scale, scale, rel_tol=_TABLE_TOLERANCE)
        expect(close, f"tables times {table.scale}", f"times {scale}, the attention factor of {self.rope}")

    def finish(self, out: Term) -> Graph:
        """The verified graph: dead operators dropped, weights in canonical order."""
        expect(out.kind is Kind.VALUE and out.core == "TC", out, "one result, the hidden state [T,E]")
        expect(bool(self.caches), "a block without attention", "one attention")
        return order_weights(dead_values(self.b.finish(out.value, *self.caches)))

    def _note(self, key: object, operands: Sequence[Value], outputs: tuple[Value, ...]) -> None:
        self._calls[key] = outputs
        level = 1 + max(self.level(v) for v in operands)
        self._levels.update((v.name, level) for v in outputs)

    def _rope_attrs(self) -> dict[str, Attr]:
        return {name: getattr(self.rope, name) for name in RopeConfig.__dataclass_fields__}


def order_weights(graph: Graph) -> Graph:
    """Weights in the order in which a builder declares them: by depth of the first reader, then in operand order.

    Depth is the longest path from the inputs; readers of equal depth come in the order of a walk from the outputs.
    """
    producers = graph.producers()
    depth: dict[int, int] = {}  # node -> longest path
    walk: dict[int, int] = {}  # node -> position in the walk

    def visit(name: str) -> int:
        index = producers.get(name)
        if index is None:
            return 0
        if index not in depth:
            depth[index] = 1 + max(visit(operand) for operand in graph.nodes[index].inputs)
            walk[index] = len(walk)
        return depth[index]

    for name in graph.outputs:
        visit(name)
    readers = sorted(depth, key=lambda index: (depth[index], walk[index]))
    first: dict[str, int] = {}
    for name in (name for index in readers for name in graph.nodes[index].inputs):
        first.setdefault(name, len(first))
    plain = [v for v in graph.inputs if v.type.role not in (Role.WEIGHT, Role.KV)]
    weights = sorted(graph.inputs_of(Role.WEIGHT), key=lambda v: first[v.name])
    return replace(graph, inputs=(*plain, *weights, *graph.inputs_of(Role.KV)))


def _few(numbers: Any) -> str:
    shown = ", ".join(f"{float(n):.5g}" for n in numbers.ravel()[:3])
    return f"[{shown}, ...] ({numbers.size})"

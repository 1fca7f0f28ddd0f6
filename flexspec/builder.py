"""The Python graph-building API: one typed method per operator, shapes checked at the call that breaks them.

    b = GraphBuilder("tiny", DType.F32)
    x = b.input("x_TE", ("T", 64))
    y = b.linear(x, b.weight("proj.weight", (128, 64)))
    graph = b.finish(y)

A refused call raises GraphError with the operand types and the caller's file and line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from flexspec.errors import GraphError
from flexspec.graph import Attr, Graph, Node, Value
from flexspec.ops.record import record_of
from flexspec.ops.rope import RopeConfig, rope_attrs
from flexspec.text import NAME
from flexspec.types import PAGE_TOKENS, Dim, DType, Role, TensorType
from flexspec.verifier import check_attrs, verify


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of every model, in the order in which executors feed them; runtime/executors/step.py explains them."""

    ids_T: Value
    positions_T: Value
    starts_R1: Value
    contexts_R: Value
    causal_R: Value
    page_table_RB: Value
    ancestors_TW: Value
    logit_rows_L: Value


class GraphBuilder:
    """Collects inputs and operator calls; ``finish`` returns the verified graph.

    ``dtype`` is that of activations, weights and caches. Weights and caches may be declared where they are first used;
    ``finish`` puts the other inputs first, then weights, then caches.
    """

    def __init__(self, name: str, dtype: DType) -> None:
        self.name, self.dtype = name, dtype
        self._inputs: list[Value] = []
        self._nodes: list[Node] = []
        self._types: dict[str, TensorType] = {}
        self._block: int | None = None

    @classmethod
    def extend(cls, graph: Graph, dtype: DType) -> GraphBuilder:
        """A builder that continues ``graph``: its values may be operands, its outputs are dropped."""
        builder = cls(graph.name, dtype)
        builder._inputs, builder._nodes = list(graph.inputs), list(graph.nodes)
        builder._types = graph.types()
        return builder

    def input(self, name: str, dims: Sequence[Dim], dtype: DType | None = None, role: Role = Role.ACTIVATION) -> Value:
        """A graph input. Raises GraphError if the name is taken or not legal."""
        value = Value(name, TensorType(dtype or self.dtype, tuple(dims), role))
        self._define(value)
        self._inputs.append(value)
        return value

    def weight(self, name: str, dims: Sequence[Dim]) -> Value:
        """A weight. The same name again gives the same value (tied weights); other dims raise GraphError."""
        kind = TensorType(self.dtype, tuple(dims), Role.WEIGHT)
        if name not in self._types:
            return self.input(name, dims, role=Role.WEIGHT)
        if self._types[name] != kind:
            raise _refuse(f"weight {name} declared as {self._types[name]} and now as {kind}", "one type", "use one")
        return Value(name, kind)

    def kv_cache(self, name: str, kv_heads: int, head_dim: int) -> Value:
        """A paged cache [P, PAGE_TOKENS, G, D]."""
        return self.input(name, ("P", PAGE_TOKENS, kv_heads, head_dim), role=Role.KV)

    def step_inputs(self) -> StepInputs:
        """Declare the inputs of a step. Raises GraphError if called twice."""
        i32 = DType.I32
        return StepInputs(
            self.input("ids_T", ("T",), i32, Role.IDS),
            self.input("positions_T", ("T",), i32, Role.TREE),
            self.input("starts_R1", ("R1",), i32, Role.TREE),
            self.input("contexts_R", ("R",), i32, Role.TREE),
            self.input("causal_R", ("R",), i32, Role.TREE),
            self.input("page_table_RB", ("R", "B"), i32, Role.TREE),
            self.input("ancestors_TW", ("T", "W"), DType.U64, Role.TREE),
            self.input("logit_rows_L", ("L",), i32, Role.IDS),
        )

    @contextmanager
    def block(self, number: int) -> Iterator[None]:
        """``with b.block(3):`` operators called inside belong to decoder block 3. Stages are cut between blocks."""
        outside, self._block = self._block, number
        try:
            yield
        finally:
            self._block = outside

    def embedding(self, ids_T: Value, weight_VE: Value, *, name: str = "") -> Value:
        """Rows of the weight by id -> [T,E]."""
        return self.call("embedding", (ids_T, weight_VE), names=(name,))[0]

    def rms_norm(self, x: Value, weight: Value, eps: float, *, name: str = "") -> Value:
        """Normalise over the last dim of [T,E] or [T,H,D]."""
        return self.call("rms_norm", (x, weight), {"eps": float(eps)}, names=(name,))[0]

    def linear(self, x_TK: Value, weight_NK: Value, bias_N: Value | None = None, *, name: str = "") -> Value:
        """x @ weight^T (+ bias) -> [T,N]."""
        operands = (x_TK, weight_NK) if bias_N is None else (x_TK, weight_NK, bias_N)
        return self.call("linear", operands, names=(name,))[0]

    def split_heads(self, x: Value, heads: int, *, name: str = "") -> Value:
        """[T, H*D] -> [T,H,D]."""
        return self.call("split_heads", (x,), {"heads": heads}, names=(name,))[0]

    def merge_heads(self, x_THD: Value, *, name: str = "") -> Value:
        """[T,H,D] -> [T, H*D]."""
        return self.call("merge_heads", (x_THD,), names=(name,))[0]

    def rope(self, x_THD: Value, positions_T: Value, rope: RopeConfig, max_positions: int, *, name: str = "") -> Value:
        """Rotate [T,H,D] by position. Raises GraphError for an unknown kind."""
        return self.call("rope", (x_THD, positions_T), rope_attrs(rope, max_positions), names=(name,))[0]

    def attention(
        self, q_THD: Value, k_TGD: Value, v_TGD: Value, k_cache: Value, v_cache: Value, step: StepInputs, scale: float
    ) -> tuple[Value, Value, Value]:
        """(o [T,H,D], both caches with the step's rows written, named after the caches with ``.new``)."""
        operands = (q_THD, k_TGD, v_TGD, k_cache, v_cache, step.starts_R1, step.contexts_R, step.causal_R,
                    step.page_table_RB, step.ancestors_TW)  # fmt: skip
        names = ("", f"{k_cache.name}.new", f"{v_cache.name}.new")
        o, k_new, v_new = self.call("attention", operands, {"scale": float(scale)}, names=names)
        return o, k_new, v_new

    def swiglu(self, gate: Value, up: Value, *, name: str = "") -> Value:
        """silu(gate) * up."""
        return self.call("swiglu", (gate, up), names=(name,))[0]

    def router(
        self, x_TE: Value, weight_XE: Value, top_k: int, *, normalize: bool, softmax: str = "all", name: str = ""
    ) -> Value:
        """Weights of each row's ``top_k`` experts -> [T,X], 0 for the others; ``softmax`` as in ops/experts.py."""
        attrs: dict[str, Attr] = {"top_k": top_k, "softmax": softmax, "normalize": normalize}
        return self.call("router", (x_TE, weight_XE), attrs, names=(name,))[0]

    def moe_experts(
        self,
        x_TE: Value,
        routing_TX: Value,
        gate_XFE: Value,
        up_XFE: Value,
        down_XEF: Value,
        top_k: int,
        *,
        name: str = "",
    ) -> Value:
        """The routed sum of what the experts compute -> [T,E]."""
        experts = gate_XFE.type.dims[0]
        attrs: dict[str, Attr] = {"top_k": top_k, "experts": experts if isinstance(experts, int) else 0}
        return self.call("moe_experts", (x_TE, routing_TX, gate_XFE, up_XFE, down_XEF), attrs, names=(name,))[0]

    def add(self, a: Value, b: Value, *, name: str = "") -> Value:
        """a + b, of equal types."""
        return self.call("add", (a, b), names=(name,))[0]

    def select_rows(self, x_TE: Value, rows_L: Value, *, name: str = "") -> Value:
        """Rows of x by index -> [L,E]."""
        return self.call("select_rows", (x_TE, rows_L), names=(name,))[0]

    def call(
        self, op: str, operands: Sequence[Value], attrs: Mapping[str, Attr] | None = None, names: Sequence[str] = ()
    ) -> tuple[Value, ...]:
        """Call any registered operator. Empty or missing names are derived from the operator.

        Raises GraphError with the operand types and the caller's line if record and operands do not fit.
        """
        pairs = tuple(sorted((attrs or {}).items()))
        for value in operands:
            if self._types.get(value.name) != value.type:
                raise _refuse(f"{op} of %{value.name}: {value.type}", "a value of this builder", "build it here")
        types = [value.type for value in operands]
        try:
            record = record_of(op)
            least, most = record.arity
            if not least <= len(types) <= most:
                raise GraphError(f"{op} with {len(types)} operands", f"{least} to {most}", record.doc)
            check_attrs(record, pairs)
            derived = record.shape(types, dict(pairs))
        except GraphError as error:
            raise _refuse(error.found, error.expected, error.fix) from None
        padded = list(names) + [""] * (len(derived) - len(names))
        outputs = tuple(
            Value(name or self._fresh(op, i), kind) for i, (name, kind) in enumerate(zip(padded, derived, strict=True))
        )
        for value in outputs:
            self._define(value)
        self._nodes.append(Node(op, tuple(value.name for value in operands), outputs, pairs, self._block))
        return outputs

    def finish(self, *outputs: Value) -> Graph:
        """The verified graph with these outputs, in order. Raises GraphError."""
        roles = {Role.WEIGHT: 1, Role.KV: 2}
        inputs = sorted(self._inputs, key=lambda value: roles.get(value.type.role, 0))  # stable: declaration order
        graph = Graph(self.name, tuple(inputs), tuple(self._nodes), tuple(value.name for value in outputs))
        verify(graph)
        return graph

    def _fresh(self, op: str, output: int) -> str:
        return f"{op}_{len(self._nodes)}" + (f".{output}" if output else "")

    def _define(self, value: Value) -> None:
        if value.name in self._types:
            raise _refuse(f"%{value.name} defined twice", "every name once", "choose another name")
        if not NAME.fullmatch(value.name):
            raise _refuse(f"name {value.name!r}", f"a name that matches {NAME.pattern}", "choose another name")
        self._types[value.name] = value.type


def _refuse(found: str, expected: str, fix: str) -> GraphError:
    """The error, prefixed with the file and line of the first caller outside this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return GraphError(f"{frame.f_code.co_filename}:{frame.f_lineno}: {found}", expected, fix)

"""The MLIR form of a graph: a registered dialect ``flexspec`` made from the operator records, printer and parser.

A value's type is a ranked tensor whose encoding holds role and symbols, as in
``tensor<?x64xf32, {role = "activation", symbols = ["T"]}>``; the attribute ``flexspec.names`` has the names. MLIR's own
verifier calls the shape rule of the operator's record, so a module that verifies is a legal graph.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

from flexspec.errors import FlexspecError, GraphError, GraphTextError, ToolchainError
from flexspec.graph import Attr, Graph, Node, Value
from flexspec.ops.record import OpRecord, all_records
from flexspec.types import Dim, DType, Role, TensorType
from flexspec.verifier import verify, verify_node
from flexspec.weight_formats.registry import weight_formats

BLOCK = "flexspec.block"  # on operations: the node's block, if it has one
NAMES = "flexspec.names"  # on operations: names of the results; on function arguments: the argument's own name
_SEGMENTS = ("operandSegmentSizes", "resultSegmentSizes")
_FIX = "pass MLIR text printed by flexspec inspect --emit=mlir"


def to_mlir(graph: Graph) -> str:
    """The graph as text of the dialect, verified by MLIR.

    Raises ToolchainError without torch-mlir, GraphError for a graph that an operator's rule rejects.
    """
    with _context() as (ir, dialect):
        module = ir.Module.create()
        codec = _Codec(ir)
        with ir.InsertionPoint(module.body):
            _emit_function(codec, dialect, graph)
        try:
            module.operation.verify()
        except ir.MLIRError as error:
            raise GraphError(
                f"graph {graph.name}: {error}", "a graph that MLIR verifies", "correct the graph"
            ) from None
        return str(module)


def from_mlir(text: str) -> Graph:
    """The graph of one function in the dialect: ``from_mlir(to_mlir(g)) == g``.

    Raises ToolchainError without torch-mlir, GraphTextError for text that does not parse or verify, GraphError.
    """
    with _context() as (ir, _):
        try:
            module = ir.Module.parse(text)
        except ir.MLIRError as error:
            raise GraphTextError(str(error), "verified MLIR of the dialect flexspec", _FIX) from None
        functions = [op.operation for op in module.body.operations]
        if len(functions) != 1 or functions[0].name != "func.func":
            found = ", ".join(op.name for op in functions) or "nothing"
            raise GraphTextError(f"a module with {found}", "one func.func", _FIX)
        graph = _read_function(_Codec(ir), functions[0])
    verify(graph)
    return graph


def _torch_mlir() -> tuple[ModuleType, ModuleType]:
    try:
        from torch_mlir import ir
        from torch_mlir.dialects import ext
    except ImportError:
        raise ToolchainError(
            "torch-mlir is not installed", "torch-mlir for MLIR output", "pip install 'flexspec[import]'"
        ) from None
    assert isinstance(ir, ModuleType) and isinstance(ext, ModuleType)
    return ir, ext


@contextmanager
def _context() -> Iterator[tuple[Any, SimpleNamespace]]:
    """A fresh MLIR context with the dialect: (the ir module, operation classes by operator name)."""
    ir, ext = _torch_mlir()
    with ir.Context(), ir.Location.unknown():
        dialect, operations = _dialect(ir, ext)
        dialect.load()
        yield ir, operations


@functools.cache
def _dialect(ir: Any, ext: Any) -> tuple[Any, SimpleNamespace]:
    """The dialect's class and its operations, one per record. Needs an open context; the classes outlive it."""
    dialect = type("Flexspec", (ext.Dialect,), {}, name="flexspec")
    operations = {name: _operation(ir, ext, dialect, record) for name, record in all_records().items()}
    return dialect, SimpleNamespace(**operations)


def _operation(ir: Any, ext: Any, dialect: Any, record: OpRecord) -> Any:
    """An operation class: operands, required attributes, results.

    Operands beyond the minimum are optional one by one, since an IRDL range holds values of one type only.
    """
    tensor = ir.RankedTensorType
    kinds = {int: ir.IntegerAttr, float: ir.FloatAttr, str: ir.StringAttr, bool: ir.IntegerAttr, tuple: ir.ArrayAttr}
    least, most = record.arity
    fields: dict[str, Any] = {f"operand{i}": ext.Operand[tensor] for i in range(least)}
    fields |= {f"operand{i}": Optional[ext.Operand[tensor]] for i in range(least, most)}  # noqa: UP045
    fixed, results = _results_of(record)
    fields |= {f"result{i}": ext.Result[tensor] for i in range(fixed)}
    fields |= {f"result{i}": Optional[ext.Result[tensor]] for i in range(fixed, results)}  # noqa: UP045
    for key, kind in sorted(record.attrs.items(), key=lambda item: item[1] is bool):  # those with a default come last
        choices = [kinds[k] for k in (kind if isinstance(kind, tuple) else (kind,))]
        fields[key] = functools.reduce(lambda a, b: a | b, choices)
    body = {"__annotations__": fields, "__doc__": record.doc, "verify_invariants": staticmethod(_verify_operation)}
    # The class treats a false attribute as missing, so booleans default to false.
    no = ext.attribute(default_factory=lambda: ir.BoolAttr.get(False))
    body |= {key: no for key, kind in record.attrs.items() if kind is bool}
    return type(f"{record.name}_op", (dialect.Operation,), body, name=record.name)


def _results_of(record: OpRecord) -> tuple[int, int]:
    """The fewest and the most results: as the layouts list them, up to one per operand in groups of any size."""
    least = max((len(layout.outputs) for layout in record.layouts), default=1)  # exchanges have no layouts
    return least, record.arity[1] - 1 if record.arity[1] - record.arity[0] > 1 else least


def _verify_operation(view: Any) -> bool:
    """MLIR's hook for an operation's rules: here the record's, for attributes and shapes."""
    ir, _ = _torch_mlir()
    op = view.operation
    try:
        codec = _Codec(ir)
        names = [f"v{i}" for i in range(len(op.operands))]
        known = {name: codec.read_type(operand.type) for name, operand in zip(names, op.operands, strict=True)}
        outputs = [Value(f"r{i}", codec.read_type(result.type)) for i, result in enumerate(op.results)]
        verify_node(codec.node(op, names, outputs), known)
    except FlexspecError as error:
        op.location.emit_error(str(error))
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Codec:
    """Types and attributes between the two forms."""

    ir: Any

    def type(self, kind: TensorType) -> Any:
        """The ranked tensor with its encoding."""
        dynamic = self.ir.ShapedType.get_dynamic_size()
        shape = [dim if isinstance(dim, int) else dynamic for dim in kind.dims]
        symbols = [dim for dim in kind.dims if isinstance(dim, str)]
        encoding = {"role": self.attr(kind.role.value)}
        if symbols:
            encoding["symbols"] = self.ir.ArrayAttr.get([self.attr(symbol) for symbol in symbols])
        if kind.format:
            encoding["format"] = self.attr(kind.format.name)
        return self.ir.RankedTensorType.get(shape, self._element(kind.dtype), self.ir.DictAttr.get(encoding))

    def read_type(self, kind: Any) -> TensorType:
        """The TensorType of a ranked tensor. Raises GraphTextError for one without our encoding."""
        try:
            tensor = self.ir.RankedTensorType(kind)
            encoding = self.ir.DictAttr(tensor.encoding)
            role = Role(encoding["role"].value)
            symbols = iter([symbol.value for symbol in encoding["symbols"]] if "symbols" in encoding else [])
            dims: list[Dim] = [
                next(symbols) if tensor.is_dynamic_dim(i) else tensor.shape[i] for i in range(tensor.rank)
            ]
            dtype = next(dtype for dtype in DType if self._element(dtype) == tensor.element_type)
            stored = weight_formats()[encoding["format"].value] if "format" in encoding else None
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
            raise GraphTextError(
                f"type {kind}", "tensor<..., {role = ..., symbols = [...], format = ...}>", _FIX
            ) from None
        if next(symbols, None) is not None:
            raise GraphTextError(f"type {kind}", "as many symbols as dynamic dims", _FIX)
        return TensorType(dtype, tuple(dims), role, stored)

    def _element(self, dtype: DType) -> Any:
        ir = self.ir
        floats = {DType.F32: ir.F32Type, DType.F16: ir.F16Type, DType.BF16: ir.BF16Type}
        if dtype in floats:
            return floats[dtype].get()
        make = ir.IntegerType.get_unsigned if dtype is DType.U64 else ir.IntegerType.get_signless
        return make(8 * dtype.size_bytes)

    def attr(self, value: Attr) -> Any:
        """An attribute: i64, f64, a boolean, a string, or an array of them."""
        ir = self.ir
        if isinstance(value, tuple):
            return ir.ArrayAttr.get([self.attr(item) for item in value])
        if isinstance(value, bool):
            return ir.BoolAttr.get(value)
        if isinstance(value, int):
            return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
        return ir.FloatAttr.get(ir.F64Type.get(), value) if isinstance(value, float) else ir.StringAttr.get(value)

    def read_attr(self, attr: Any) -> Attr:
        if isinstance(attr, self.ir.ArrayAttr):
            return tuple(self.read_attr(item) for item in attr)  # type: ignore[return-value]
        value = getattr(attr, "value", None)
        if not isinstance(value, bool | int | float | str):
            raise GraphTextError(f"attribute {attr}", "a number, a string, a boolean or an array of them", _FIX)
        return value

    def node(self, op: Any, inputs: Sequence[str], outputs: Sequence[Value]) -> Node:
        """The node of an operation."""
        skip = (NAMES, BLOCK, *_SEGMENTS)
        attrs = sorted((key, self.read_attr(op.attributes[key])) for key in op.attributes if key not in skip)
        return Node(op.name.removeprefix("flexspec."), tuple(inputs), tuple(outputs), tuple(attrs), self._block(op))

    def _block(self, op: Any) -> int | None:
        if BLOCK not in op.attributes:
            return None
        block = self.read_attr(op.attributes[BLOCK])
        if type(block) is not int or block < 0:
            raise GraphTextError(f"{BLOCK} = {block!r}", "a block number, 0 or more", _FIX)
        return block

    def names(self, owner: Any, count: int) -> list[str]:
        """The ``flexspec.names`` of an operation or an argument's dictionary."""
        listed = NAMES in owner and isinstance(owner[NAMES], self.ir.ArrayAttr)
        names = list(owner[NAMES]) if listed else []
        if len(names) != count or not all(isinstance(name, self.ir.StringAttr) for name in names):
            raise GraphTextError(f"{len(names)} names for {count} values", f"{NAMES} = one string per value", _FIX)
        return [name.value for name in names]


def _emit_function(codec: _Codec, operations: SimpleNamespace, graph: Graph) -> None:
    from torch_mlir.dialects import func

    ir, types = codec.ir, graph.types()
    signature = ([codec.type(v.type) for v in graph.inputs], [codec.type(types[name]) for name in graph.outputs])
    function = func.FuncOp(graph.name, signature)
    function.arg_attrs = [ir.DictAttr.get({NAMES: ir.ArrayAttr.get([codec.attr(v.name)])}) for v in graph.inputs]
    block = function.add_entry_block()
    values = dict(zip((v.name for v in graph.inputs), block.arguments, strict=True))
    with ir.InsertionPoint(block):
        for node in graph.nodes:
            op = _emit_node(codec, operations, node, [values[name] for name in node.inputs])
            op.attributes[NAMES] = ir.ArrayAttr.get([codec.attr(v.name) for v in node.outputs])
            if node.block is not None:
                op.attributes[BLOCK] = codec.attr(node.block)
            values.update((v.name, result) for v, result in zip(node.outputs, op.results, strict=True))
        func.ReturnOp([values[name] for name in graph.outputs])


def _emit_node(codec: _Codec, operations: SimpleNamespace, node: Node, operands: list[Any]) -> Any:
    record = all_records()[node.op]
    fields: dict[str, Any] = {f"operand{i}": None for i in range(record.arity[1])}
    fields |= {f"result{i}": None for i in range(_results_of(record)[1])}
    fields |= {f"operand{i}": operand for i, operand in enumerate(operands)}
    fields |= {f"result{i}": codec.type(value.type) for i, value in enumerate(node.outputs)}
    attrs = {key: codec.attr(value) for key, value in node.attrs}
    fields |= {key: attr for key, attr in attrs.items() if key in record.attrs}
    op = getattr(operations, node.op)(**fields).operation
    for key in attrs.keys() - record.attrs.keys():  # optional ones are not part of the class
        op.attributes[key] = attrs[key]
    return op


def _read_function(codec: _Codec, function: Any) -> Graph:
    """The graph of a verified function of one block."""
    blocks = list(function.regions[0].blocks)
    if len(blocks) != 1:
        raise GraphTextError(f"{len(blocks)} blocks", "a function with one block", _FIX)
    body, known, inputs = blocks[0], {}, []
    attrs = list(function.attributes["arg_attrs"]) if "arg_attrs" in function.attributes else []
    attrs = attrs or [codec.ir.DictAttr.get({})] * len(body.arguments)
    for argument, named in zip(body.arguments, attrs, strict=True):
        inputs.append(Value(codec.names(named, 1)[0], codec.read_type(argument.type)))
        known[argument] = inputs[-1].name
    nodes: list[Node] = []
    for view in body.operations:
        op = view.operation
        operands = [known[operand] for operand in op.operands]
        if op.name == "func.return":
            break
        if not op.name.startswith("flexspec."):
            raise GraphTextError(f"operation {op.name}", "operations of the dialect flexspec", _FIX)
        names = codec.names(op.attributes, len(op.results))
        outputs = [Value(name, codec.read_type(r.type)) for name, r in zip(names, op.results, strict=True)]
        nodes.append(codec.node(op, operands, outputs))
        known.update(zip(op.results, names, strict=True))
    name = codec.read_attr(function.attributes["sym_name"])
    return Graph(str(name), tuple(inputs), tuple(nodes), tuple(operands))

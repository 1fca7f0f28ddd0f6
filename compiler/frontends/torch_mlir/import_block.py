"""The door for PyTorch programs: ``torch.export`` -> torch-mlir -> canonical operators, one decoder block at a time.

A plain PyTorch decoder block is exported with a dynamic number of rows, imported by torch-mlir at ``raw`` with an empty
decomposition table (one operator per concept), and raised operator by operator by the rules in ``rules.py``.
The graph has the same hash as that block made with the builder, however the block was written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flexspec.builder import GraphBuilder
from flexspec.compiler.frontends.torch_mlir.fold import fold
from flexspec.compiler.frontends.torch_mlir.rules import RULES
from flexspec.compiler.frontends.torch_mlir.terms import Kind, Scalar, Scope, Shape, Term, Unmatched, expect
from flexspec.errors import FlexspecError, ImportProgramError, ToolchainError
from flexspec.graph import Graph, Value
from flexspec.ops.rope import RopeConfig
from flexspec.types import Dim, DType

if TYPE_CHECKING:
    import torch

ROWS = 6  # rows of the traced example; the graph has T
_KINDS = ("hidden", "positions", "cos", "sin")
_FRAME = re.compile(r'"([^"]+)":(\d+):')
_TENSOR = re.compile(r"!torch\.vtensor<\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class BlockInput:
    """One argument of the block's ``forward``.

    ``kind``: hidden (the state), positions (int64), cos or sin (tables gathered by position, last dim D/2, or D with
    every frequency twice; assumed to be those of the ``rope`` passed to ``import_torch_block``).
    """

    kind: str
    dims: tuple[Dim, ...]  # "T" for the rows, as in (1, "T", 64)


def import_torch_block(
    module: torch.nn.Module,
    inputs: Mapping[str, BlockInput],
    *,
    rope: RopeConfig,
    max_positions: int,
    prefix: str = "layers.0",
    rename: Mapping[str, str] | None = None,
    name: str = "block",
) -> Graph:
    """The canonical graph of a PyTorch decoder block that attends causally over its own rows, without a cache.

    ``inputs`` describes the arguments of ``forward`` by name. The result reads the step inputs, ``x_TE``, weights
    named ``prefix`` + module path, and paged caches; it returns y [T,E] and both caches, like ``llama.build_block``.
    ``rename`` maps module paths (``attention.wq``) to canonical ones (``self_attn.q_proj``).

    Raises ImportProgramError naming the torch operator and the line of the module's source, or ToolchainError.
    """
    fx = _torch_mlir()
    _check_inputs(inputs)
    dtype = _dtype_of(module)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    mlir = _trace(fx, module, tensors, inputs, dtype, max_positions)
    b = GraphBuilder(name, dtype)
    step = b.step_inputs()
    hidden = next(argument for argument in inputs.values() if argument.kind == "hidden")
    x_TE = b.input("x_TE", ("T", hidden.dims[-1]))
    scope = Scope(b, step, rope, max_positions, prefix)
    terms = [_parameter(b, module, path, tensors[path], prefix, rename or {}) for path in tensors]
    terms += [_argument(argument, x_TE) for argument in inputs.values()]
    return _walk(mlir, terms, scope)


def _torch_mlir() -> ModuleType:
    try:
        from torch_mlir import fx
    except ImportError:
        raise ToolchainError(
            "torch-mlir is not installed", "torch-mlir to read PyTorch programs", "pip install 'flexspec[import]'"
        ) from None
    assert isinstance(fx, ModuleType)
    return fx


def _check_inputs(inputs: Mapping[str, BlockInput]) -> None:
    kinds, shapes = [argument.kind for argument in inputs.values()], [argument.dims for argument in inputs.values()]
    legal = kinds.count("hidden") == 1 and all(kind in _KINDS for kind in kinds) and len(set(kinds)) == len(kinds)
    rows = all(dims.count("T") == 1 and set(map(type, dims)) <= {int, str} for dims in shapes)
    if not legal or not rows:
        raise ImportProgramError(
            f"inputs of kinds {kinds} with dims {shapes}",
            f"one hidden, each of {', '.join(_KINDS)} at most once, and one dim T in each",
            'describe the arguments of forward, as in {"x": BlockInput("hidden", (1, "T", 64))}',
        )


def _dtype_of(module: torch.nn.Module) -> DType:
    names = {str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()}
    known = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}
    if len(names) != 1 or not names <= set(known):
        raise ImportProgramError(
            f"parameters of dtypes {sorted(names)}",
            f"one of {', '.join(known)} for all",
            "convert it: module.to(dtype)",
        )
    return known[names.pop()]


def _trace(
    fx: ModuleType,
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    inputs: Mapping[str, BlockInput],
    dtype: DType,
    max_positions: int,
) -> Any:
    """The torch-dialect module: parameters and buffers are its first arguments, then ``inputs`` in order."""
    import torch

    class Lifted(torch.nn.Module):
        """The block with its tensors as arguments: traced weights stay small and keep their order."""

        def forward(self, tensors: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]) -> Any:
            return torch.func.functional_call(module, tensors, (), inputs)

    rows = torch.export.Dim("T", min=2, max=max(max_positions, ROWS))
    floats = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}[dtype]
    examples = {
        name: torch.zeros([ROWS if n == "T" else int(n) for n in argument.dims],
                          dtype=torch.int64 if argument.kind == "positions" else floats)
        for name, argument in inputs.items()
    }  # fmt: skip
    dynamic = {name: {argument.dims.index("T"): rows} for name, argument in inputs.items()}
    try:
        return fx.export_and_import(
            Lifted(), dict(tensors), examples, output_type="raw", func_name="block", decomposition_table={},
            dynamic_shapes={"tensors": dict.fromkeys(tensors), "inputs": dynamic},
        )  # fmt: skip
    except Exception as error:  # torch.export and torch-mlir raise many types, each about the user's program
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise ImportProgramError(
            f"torch.export of {type(module).__name__} failed: {first[0][:300]}",
            "a block that exports with any number of rows T",
            "see https://docs.pytorch.org/docs/stable/export.html for what can be exported",
        ) from error


def _parameter(
    b: GraphBuilder, module: torch.nn.Module, path: str, tensor: torch.Tensor, prefix: str, rename: Mapping[str, str]
) -> Term:
    """Parameters are weights under canonical names; buffers are constants, whose values the rules may read."""
    shape = tuple(tensor.shape)
    owner, _, leaf = path.rpartition(".")
    is_weight = any(path == name for name, _ in module.named_parameters())
    if not is_weight or len(shape) not in (1, 2):
        return constant(tensor)
    canonical = f"{prefix}.{rename.get(owner, owner)}.{leaf}" if owner else f"{prefix}.{leaf}"
    return Term(Kind.WEIGHT, "N" if len(shape) == 1 else "NK", shape, b.weight(canonical, shape))


def constant(tensor: torch.Tensor) -> Term:
    """A known tensor; its only long dim, if it has just one, is that of rotary frequencies."""
    axes = "".join("1" if n == 1 else "F" for n in tensor.shape)
    return Term(Kind.CONST, axes, tuple(tensor.shape), const=tensor.detach())


def _argument(argument: BlockInput, x_TE: Value) -> Term:
    shape: Shape = tuple(None if isinstance(n, str) else n for n in argument.dims)
    last = "C" if argument.kind == "hidden" else "F"
    axes = "".join("T" if n is None else "1" if n == 1 and i < len(shape) - 1 else last for i, n in enumerate(shape))
    if argument.kind == "hidden":
        return Term(Kind.VALUE, axes, shape, x_TE)
    if argument.kind == "positions":
        return Term(Kind.POSITIONS, axes, shape)
    return Term(Kind.TABLE, axes, shape, table=argument.kind, ready=True)


def _walk(mlir: Any, terms: Sequence[Term], scope: Scope) -> Graph:
    """Raise the operators of the function ``block`` in order; the values of its arguments are ``terms``."""
    body = mlir.body.operations[0].regions[0].blocks[0]
    known: dict[Any, Any] = dict(zip(body.arguments, terms, strict=True))
    for view in body.operations:
        op = view.operation
        name = _name_of(op)
        operands = [known[operand] for operand in op.operands]
        try:
            if name == "func.return":
                expect(len(operands) == 1 and isinstance(operands[0], Term), f"{len(operands)} results", "one result")
                return scope.finish(operands[0])
            known.update(zip(op.results, _results_of(scope, op, name, operands), strict=True))
        except (Unmatched, FlexspecError) as error:
            raise ImportProgramError(
                f"{_source_of(op)}: torch operator {name}: {error.found}", error.expected, _fix(name)
            ) from None
    raise AssertionError("a function without a return")


def _name_of(op: Any) -> str:
    name = op.attributes["name"].value if op.name == "torch.operator" else op.name
    return str(name).removeprefix("torch.")


def _results_of(scope: Scope, op: Any, name: str, operands: list[Any]) -> Sequence[Any]:
    """Values of the results: Terms, or Python numbers, lists and None for constants."""
    if name.startswith("constant."):
        kind = name.removeprefix("constant.")
        return [None if kind in ("none", "device") else op.attributes["value"].value]
    if not op.results:  # assertions about metadata and sizes
        return []
    if name == "prim.ListConstruct":
        return [operands]
    if name == "prim.ListUnpack":
        return list(operands[0])
    if name == "aten.size.int":
        n = operands[0].shape[operands[1]]
        return [Scalar.ROWS if n is None else n]
    types = [str(result.type) for result in op.results]
    if not any("vtensor" in kind for kind in types):
        return [Scalar.OTHER]  # arithmetic on sizes: views are recognised by the types of their results
    folded = fold(name, operands)
    if folded is not None:
        return [constant(folded)]
    if name not in RULES:
        raise Unmatched(
            "it has no canonical form", "operators of a Llama-like decoder block (see docs/design/torch-mlir.md)"
        )
    result = RULES[name](scope, operands, _shape_of(types[0]))
    floats = types[0].split(",")[-1].startswith(("f", "bf")) or not isinstance(result, Term)
    expect(floats or result.kind is Kind.POSITIONS, f"a result of type {types[0]}", "floating-point numbers")
    return [result]


def _shape_of(text: str) -> Shape:
    match = _TENSOR.match(text)
    if match is None:
        return ()
    return tuple(None if n == "?" else int(n) for n in match[1].split(",") if n)


def _source_of(op: Any) -> str:
    """file:line of the innermost frame that is not torch's own."""
    import torch

    frames = _FRAME.findall(str(op.location))
    user_frames = [frame for frame in frames if not frame[0].startswith(os.path.dirname(torch.__file__))]
    file, line = (user_frames or frames or [("unknown file", "0")])[0]
    return f"{file}:{line}"


def _fix(name: str) -> str:
    if name not in RULES:
        return (
            "write the step with other torch operators, or add a rule for it to compiler/frontends/torch_mlir/rules.py"
        )
    return "write this step of the block in the expected form"

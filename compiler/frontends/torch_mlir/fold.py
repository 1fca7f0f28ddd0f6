"""Constant folding while a torch program is raised: an operator whose operands are all known is run once.

It is needed for rotary frequencies: the program computes them, and the rules compare their values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexspec.compiler.frontends.torch_mlir.terms import Kind, Scalar, Term

if TYPE_CHECKING:
    import torch

_MAKERS = ("arange", "full", "ones", "zeros", "scalar_tensor", "tensor")  # operators without tensor operands
_DTYPE_CODES = {  # torch's c10::ScalarType
    0: "uint8",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    7: "float64",
    11: "bool",
    15: "bfloat16",
}
_MAX_ELEMENTS = 1 << 24


def fold(name: str, operands: list[Any]) -> torch.Tensor | None:
    """The result of ``name`` (such as ``aten.pow.Scalar``) if every operand is known, else None."""
    flat = [x for operand in operands for x in (operand if isinstance(operand, list) else [operand])]
    terms = [x for x in flat if isinstance(x, Term)]
    parts = name.split(".")
    if any(isinstance(x, Scalar) for x in flat) or any(term.kind is not Kind.CONST for term in terms):
        return None
    if parts[0] != "aten" or (not terms and not parts[1].startswith(_MAKERS)):
        return None
    import torch

    packet = getattr(torch.ops.aten, parts[1], None)
    function = getattr(packet, parts[2] if len(parts) > 2 else "default", None)
    if function is None:
        return None
    arguments, options = [], {}
    for spec, operand in zip(function._schema.arguments, operands, strict=True):
        value = _plain(operand)
        if "ScalarType" in str(spec.type) or spec.name == "dtype":
            value = None if value is None else getattr(torch, _DTYPE_CODES[value])
        if not spec.kwarg_only:
            arguments.append(value)
        elif spec.name not in ("device", "layout", "pin_memory"):
            options[spec.name] = value
    result = function(*arguments, **options)
    return result if isinstance(result, torch.Tensor) and result.numel() <= _MAX_ELEMENTS else None


def _plain(operand: Any) -> Any:
    if isinstance(operand, list):
        return [_plain(item) for item in operand]
    return operand.const if isinstance(operand, Term) else operand

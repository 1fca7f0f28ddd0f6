"""Element-by-element operators: a kernel generated from the expression in the operator's record."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexspec.arithmetic import ceil_div
from flexspec.errors import CompileError
from flexspec.graph import Attr, Node
from flexspec.kernels.expression import record_expression
from flexspec.kernels.gpu.expression import to_triton
from flexspec.kernels.gpu.family import TRITON_DTYPES, Entry, KernelFamily, Kernels, KernelsOf, KernelStep
from flexspec.kernels.gpu.targets import Target
from flexspec.ops.record import all_records, record_of
from flexspec.types import DType, TensorType

if TYPE_CHECKING:
    import torch

ALIGNMENT_BYTES = 16  # of pointers, which the binaries assume
# Largest difference from float64 by dtype, as a share of results above 1: the last place of the result, which Triton's
# interpreter rounds towards zero in bf16; in f32 a few places, for the exponential function.
TOLERANCE = {DType.F32: 1e-5, DType.F16: 1e-3, DType.BF16: 8e-3}


@dataclass(frozen=True, slots=True)
class RowwiseVariant:
    """One operator with the attributes of a node. Raises CompileError where its expression has no translation."""

    family: ClassVar[str] = "rowwise"
    op: str
    expression: str  # of the record, attributes filled in
    operands: int
    dtype: DType

    def __post_init__(self) -> None:
        to_triton(self.expression, self.operands)
        if self.dtype not in TRITON_DTYPES:
            raise CompileError(
                f"row-wise operator {self.op} of {self.dtype.value}", "f32, f16 or bf16", "choose another dtype"
            )

    @property
    def name(self) -> str:
        """Contains a hash of the expression: one operator may occur with several values of its attributes."""
        digest = hashlib.sha256(self.expression.encode()).hexdigest()[:8]
        return f"rowwise_{self.op}_{digest}_{self.dtype.value}"


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """How the elements are cut: ``block`` of them, a power of two, for one program."""

    block: int
    warps: int
    stages: int = 1  # there is no loop to pipeline

    @property
    def name(self) -> str:
        return f"b{self.block}_w{self.warps}"


_CONFIG = BlockConfig(1024, 4)


@dataclass(frozen=True, slots=True)
class RowwiseCase:
    """Random operands for one operator; each of its attributes is 2."""

    op: str
    dtype: DType
    elements: int = 2500  # whole blocks and a part of one
    from_source: bool = True

    @property
    def label(self) -> str:
        return f"{self.op} {self.dtype.value}"

    @property
    def limit(self) -> float:
        return TOLERANCE[self.dtype]

    def node(self) -> Node:
        record = record_of(self.op)
        attrs = tuple((name, kind(2)) for name, kind in sorted(record.attrs.items()) if isinstance(kind, type))
        return Node(self.op, tuple(f"x{i}" for i in range(record.arity[0])), (), attrs)

    def variant(self) -> RowwiseVariant:
        node = self.node()
        return RowwiseVariant(self.op, record_expression(node), len(node.inputs), self.dtype)

    def error(self, kernels: Kernels, device: str) -> float:
        """The largest difference from the record's reference in float64."""
        import torch

        from flexspec.kernels.reference import TORCH_DTYPES

        node, generator = self.node(), torch.Generator().manual_seed(0)
        operands = [
            (3 * torch.randn(self.elements, generator=generator)).to(TORCH_DTYPES[self.dtype]) for _ in node.inputs
        ]
        (expected,) = record_of(self.op).reference([operand.double() for operand in operands], dict(node.attrs))
        result = launch(kernels, [operand.to(device) for operand in operands]).double().cpu()
        error = float(((result - expected).abs() / expected.abs().clamp(min=1.0)).max())
        return error if error == error else float("inf")


def variant_of(node: Node, types: Mapping[str, TensorType], max_tree_tokens: int) -> RowwiseVariant:
    """The variant of a row-wise node. Raises CompileError where its operands are not of one type."""
    del max_tree_tokens
    operands = [types[name] for name in node.inputs]
    if any((operand.dtype, operand.dims) != (operands[0].dtype, operands[0].dims) for operand in operands):
        found = ", ".join(map(str, operands))
        raise CompileError(f"row-wise operator {node.op} over {found}", "operands of one type", "cast them first")
    return RowwiseVariant(node.op, record_expression(node), len(operands), operands[0].dtype)


def entries(variant: RowwiseVariant) -> tuple[Entry, ...]:
    operands = tuple((f"p{i}", "*") for i in range(variant.operands))
    return (Entry("rowwise", (*operands, ("out", "*"), ("elements", "i32"))),)


def configs(variant: RowwiseVariant, target: Target) -> tuple[BlockConfig, ...]:
    del variant, target  # a stream of loads and stores is the same everywhere
    return (_CONFIG,)


def template_values(variant: RowwiseVariant, config: BlockConfig) -> dict[str, object]:
    del config
    return {"expression": to_triton(variant.expression, variant.operands)}


def run(
    kernels_of: KernelsOf,
    variant: RowwiseVariant,
    attrs: Mapping[str, Attr],
    inputs: Sequence[torch.Tensor],
    step: KernelStep,
) -> tuple[torch.Tensor, ...]:
    del attrs, step  # the attributes are in the source
    return (launch(kernels_of(variant), inputs),)


def launch(kernels: Kernels, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result, with the shape of the operands."""
    import torch

    operands = [_aligned(operand) for operand in operands]
    out = torch.empty_like(operands[0])
    grid = (ceil_div(out.numel(), kernels.config.block), 1, 1)
    if out.numel():
        kernels.launch("rowwise", grid, (*operands, out, out.numel()))
    return out


def _aligned(operand: torch.Tensor) -> torch.Tensor:
    """Contiguous, and aligned as the binaries assume: a view may begin anywhere."""
    operand = operand.contiguous()
    return operand if operand.data_ptr() % ALIGNMENT_BYTES == 0 else operand.clone()


def check_cases(interpreted: bool) -> tuple[RowwiseCase, ...]:
    """Every operator of the family; only in float32 under Triton's interpreter."""
    ops = [name for name, record in all_records().items() if record.kernel.triton == RowwiseVariant.family]
    dtypes = (DType.F32,) if interpreted else tuple(TOLERANCE)
    return tuple(RowwiseCase(op, dtype) for op in ops for dtype in dtypes)


FAMILY: KernelFamily[RowwiseVariant, BlockConfig] = KernelFamily(
    name=RowwiseVariant.family,
    template="rowwise.py.j2",
    config_type=BlockConfig,
    variant_of=variant_of,
    entries=entries,
    configs=configs,
    plain_config=_CONFIG,
    values=template_values,
    run=run,
    cases=check_cases,
)

"""Every operator record: shape rule against reference, costs, tensor-parallel layouts by running them, refusals."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from flexspec.errors import GraphError
from flexspec.graph import Attr
from flexspec.ops.record import KernelKey, OpRecord, TpLayout, all_records, record_of
from flexspec.types import DType, Role, TensorType

SIZES = {"T": 6, "L": 3, "R": 2, "R1": 3, "B": 3, "P": 5, "W": 1, "S": 20}
ROPE: dict[str, Attr] = {
    "theta": 1e4, "kind": "default", "factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_positions": 0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 0.0, "max_positions": 64,
}  # fmt: skip
_TORCH = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.I32: torch.int32, DType.U64: torch.uint64}


def t(text: str) -> TensorType:
    """``f32[T,8]`` as a type; the role does not matter to shape rules."""
    dtype, _, dims = text.rstrip("]").partition("[")
    parsed = tuple(int(d) if d.isdigit() else d for d in dims.split(","))
    return TensorType(DType(dtype), parsed, Role.ACTIVATION)


@dataclass(frozen=True)
class Case:
    """Operand types of one call; integer operands get the values in ``ints``."""

    op: str
    types: tuple[str, ...]
    attrs: dict[str, Attr] = field(default_factory=dict)
    ints: dict[int, list] = field(default_factory=dict)  # type: ignore[type-arg]
    layouts: tuple[str, ...] = ()  # layouts this case can show; empty: all


_IDS = {0: [3, 1, 4, 1, 5, 9]}
_STEP = {5: [0, 4, 6], 6: [20, 0], 7: [0, 1], 8: [[4, 2, 0], [1, 0, 0]], 9: [[1], [3], [5], [11], [0], [0]]}
CASES = [
    Case("add", ("f32[T,8]", "f32[T,8]")),
    Case("swiglu", ("f32[T,8]", "f32[T,8]")),
    Case("rms_norm", ("f32[T,8]", "f32[8]"), {"eps": 1e-5}),
    Case("rms_norm", ("f32[T,4,8]", "f32[8]"), {"eps": 1e-5}),
    Case("embedding", ("i32[T]", "f32[12,8]"), ints=_IDS),
    Case("embedding", ("i32[T]", "f32[4,8]"), {"first_row": 3, "rows": 12}, _IDS, layouts=("replicated", "hidden")),
    Case("select_rows", ("f32[T,8]", "i32[L]"), ints={1: [5, 0, 2]}),
    Case("split_heads", ("f32[T,32]",), {"heads": 4}),
    Case("merge_heads", ("f32[T,4,8]",)),
    Case("linear", ("f32[T,8]", "f32[12,8]")),
    Case("linear", ("f32[T,8]", "f32[12,8]", "f32[12]")),
    Case("linear_group", ("f32[T,8]", "f32[12,8]", "f32[4,8]"), {"count": 2, "biased": False}),
    Case("linear_group", ("f32[T,8]", "f32[12,8]", "f32[4,8]", "f32[12]", "f32[4]"), {"count": 2, "biased": True}),
    Case("linear_swiglu", ("f32[T,8]", "f32[12,8]", "f32[12,8]")),
    Case("linear_add", ("f32[T,8]", "f32[8,8]", "f32[T,8]")),
    Case("linear_add", ("f32[T,8]", "f32[12,8]", "f32[T,12]", "f32[12]")),
    Case("router", ("f32[T,8]", "f32[6,8]"), {"top_k": 2, "softmax": "all", "normalize": True}),
    Case("router", ("f32[T,8]", "f32[6,8]"), {"top_k": 6, "softmax": "chosen", "normalize": False}),
    Case(
        "moe_experts",
        ("f32[T,8]", "f32[T,6]", "f32[6,4,8]", "f32[6,4,8]", "f32[6,8,4]"),
        {"top_k": 2, "experts": 6},
    ),
    Case("rope", ("f32[T,4,8]", "i32[T]"), ROPE, {1: [0, 5, 6, 6, 7, 63]}),
    Case("partition", ("f32[T,8]",), {"dim": 1, "first": 2, "end": 8}),
    Case("combine", ("f32[T,8]",), {"dim": 1, "ranks": (3,), "sizes": (8,), "part": 0}),
    Case("reduce", ("f32[T,8]",), {"ranks": (3,)}),
    Case("replicate", ("f32[T,8]",), {"ranks": (3, 0), "root": 3, "dtype": "f32", "columns": (8,)}),
    Case("send", ("f32[T,8]",), {"to": 1, "channel": 0}),
    Case("recv", ("f32[T,8]",), {"source": 1, "channel": 0, "dtype": "f32", "columns": (8,)}),
    Case(
        "attention",
        ("f32[T,4,8]", "f32[T,2,8]", "f32[T,2,8]", "f32[P,32,2,8]", "f32[P,32,2,8]", "i32[R1]", "i32[R]", "i32[R]",
         "i32[R,B]", "u64[T,W]"),
        {"scale": 0.35},
        _STEP,
    ),
]  # fmt: skip
_NAMES = [f"{case.op}-{len(case.types)}-{case.types[0]}" for case in CASES]


def tensors(case: Case, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, kind in enumerate(map(t, case.types)):
        shape = [SIZES[d] if isinstance(d, str) else d for d in kind.dims]
        if i in case.ints:
            made.append(torch.tensor(case.ints[i]).to(_TORCH[kind.dtype]))
        else:
            made.append(torch.randn(shape, generator=generator))
    return made


def test_every_operator_has_a_case() -> None:
    assert {case.op for case in CASES} == set(all_records())


@pytest.mark.parametrize("case", CASES, ids=_NAMES)
def test_shape_rule_and_costs_agree_with_the_reference(case: Case) -> None:
    record = record_of(case.op)
    types = [t(text) for text in case.types]
    derived = record.shape(types, case.attrs)
    inputs, before = tensors(case), tensors(case)
    results = record.reference(inputs, case.attrs)
    assert [list(r.shape) for r in results] == [
        [SIZES[d] if isinstance(d, str) else d for d in kind.dims] for kind in derived
    ]
    assert [_TORCH[kind.dtype] for kind in derived] == [r.dtype for r in results]
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True)), "references do not write to operands"
    is_view = record.kernel.cpu == "view"
    flops, moved = (rule(types, derived, case.attrs, SIZES) for rule in (record.flops, record.bytes))
    assert (flops, moved) == (0, 0) if is_view else (flops > 0 and moved > 0)


@pytest.mark.parametrize("case", [c for c in CASES if c.op not in ("split_heads", "merge_heads")], ids=lambda c: c.op)
def test_costs_grow_with_rows(case: Case) -> None:
    record = record_of(case.op)
    types = [t(text) for text in case.types]
    derived = record.shape(types, case.attrs)
    more = SIZES | {"T": 60, "L": 30}
    for rule in (record.flops, record.bytes):
        assert rule(types, derived, case.attrs, more) > rule(types, derived, case.attrs, SIZES)


def test_linear_flops_are_two_per_weight_element_and_row() -> None:
    types = [t("f32[T,8]"), t("f32[12,8]")]
    record = record_of("linear")
    outs = record.shape(types, {})
    assert record.flops(types, outs, {}, {"T": 6}) == 2 * 6 * 8 * 12 + 6 * 12
    assert record.bytes(types, outs, {}, {"T": 6}) == 4 * (6 * 8 + 8 * 12 + 6 * 12)


def test_experts_cost_what_is_expected_to_be_touched() -> None:
    """One row reads its two experts of eight, many rows all of them; a rank with half of them, half."""
    record = record_of("moe_experts")
    types = [t(text) for text in ("f32[T,8]", "f32[T,8]", "f32[8,4,8]", "f32[8,4,8]", "f32[8,8,4]")]
    half = [t(text) for text in ("f32[T,8]", "f32[T,4]", "f32[4,4,8]", "f32[4,4,8]", "f32[4,8,4]")]
    attrs: dict[str, Attr] = {"top_k": 2, "experts": 8}
    expert = 3 * 4 * 8 * 4  # bytes
    for rows, touched in ((1, 2.0), (2, 3.5), (500, 8.0)):
        sizes = {"T": rows}
        passed = 4 * rows * (8 + 8 + 8)
        assert record.bytes(types, record.shape(types, attrs), attrs, sizes) == passed + round(touched * expert)
        halved = 4 * rows * (8 + 4 + 8) + round(touched / 2 * expert)
        assert record.bytes(half, record.shape(half, attrs), attrs, sizes) == halved
        flops = record.flops(types, record.shape(types, attrs), attrs, sizes)
        assert flops == 2 * rows * (2 * 3 * 4 * 8 + 2 * 8 + 5 * 4)
        assert record.flops(half, record.shape(half, attrs), attrs, sizes) == flops // 2


def _rank_operands(layout: TpLayout, inputs: list[torch.Tensor], rank: int, degree: int) -> list[torch.Tensor]:
    shares = []
    for i, x in enumerate(inputs):
        dim = layout.input_dim(i)
        if dim is None:
            shares.append(x)
        elif dim == "partial":  # any split into a sum will do; these terms are unequal
            shares.append(x * (2.0 if rank == 0 else -1.0 / (degree - 1)))
        else:
            shares.append(x.chunk(degree, int(dim))[rank])
    return shares


def _layout_cases() -> list[tuple[Case, TpLayout]]:
    return [
        (case, layout)
        for case in CASES
        for layout in record_of(case.op).layouts
        if not case.layouts or layout.name in case.layouts
        if layout.operand_dims in (None, len(t(case.types[0]).dims))
    ]


@pytest.mark.parametrize(
    ("case", "layout"), _layout_cases(), ids=lambda x: x.name if isinstance(x, TpLayout) else f"{x.op}{len(x.types)}"
)
def test_layouts_compute_the_whole(case: Case, layout: TpLayout) -> None:
    """Run each rank on its operands and put the outputs together as the layout says."""
    degree = 2
    record = record_of(case.op)
    inputs = tensors(case)
    whole = record.reference(inputs, case.attrs)
    ranks = []
    for rank in range(degree):
        attrs = dict(case.attrs)
        attrs |= {key: int(attrs[key]) // degree for key in layout.scaled_attrs}  # type: ignore[arg-type]
        operands = _rank_operands(layout, inputs, rank, degree)
        if layout.first_attr is not None:
            attrs[layout.first_attr] = rank * operands[1].shape[0]
        if layout.whole_attr is not None:
            attrs[layout.whole_attr] = inputs[1].shape[0]
        ranks.append(record.reference(operands, attrs))
    for j, wanted in enumerate(whole):
        dim = layout.output_dim(j)
        parts = [outputs[j] for outputs in ranks]
        if dim is None:
            found = parts[0]
            assert all(torch.equal(parts[0], part) for part in parts)
        else:
            found = sum(parts) if dim == "partial" else torch.cat(parts, int(dim))  # type: ignore[assignment]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


_ROUTER: dict[str, Attr] = {"top_k": 2, "softmax": "all", "normalize": True}
_EXPERTS: dict[str, Attr] = {"top_k": 2, "experts": 6}
REFUSED = [
    ("add", ("f32[T,8]", "f32[T,4]"), {}),
    ("add", ("f32[T,8]", "bf16[T,8]"), {}),
    ("swiglu", ("i32[T,8]", "i32[T,8]"), {}),
    ("rms_norm", ("f32[T,8]", "f32[4]"), {"eps": 1e-5}),
    ("rms_norm", ("f32[T]", "f32[T]"), {"eps": 1e-5}),
    ("rms_norm", ("f32[T,8]", "f32[8]"), {"eps": 0.0}),
    ("embedding", ("f32[T]", "f32[12,8]"), {}),
    ("embedding", ("i32[T]", "i32[12,8]"), {}),
    ("select_rows", ("f32[T,8]", "i32[L,1]"), {}),
    ("split_heads", ("f32[T,30]",), {"heads": 4}),
    ("split_heads", ("f32[T,30]",), {"heads": 0}),
    ("split_heads", ("f32[8,T]",), {"heads": 4}),
    ("merge_heads", ("f32[T,8]",), {}),
    ("linear", ("f32[T,8]", "f32[8,12]"), {}),
    ("linear", ("f32[T,4,8]", "f32[12,8]"), {}),
    ("linear", ("f32[T,8]", "f32[12,8]", "f32[8]"), {}),
    ("linear_group", ("f32[T,8]", "f32[12,8]"), {"count": 2, "biased": False}),
    ("linear_group", ("f32[T,8]", "f32[12,8]"), {"count": 0, "biased": False}),
    ("linear_group", ("f32[T,8]", "f32[12,8]", "f32[4,8]", "f32[4]", "f32[12]"), {"count": 2, "biased": True}),
    ("linear_swiglu", ("f32[T,8]", "f32[12,8]", "f32[16,8]"), {}),
    ("linear_add", ("f32[T,8]", "f32[12,8]", "f32[T,8]"), {}),
    ("rope", ("f32[T,4,7]", "i32[T]"), ROPE),
    ("rope", ("f32[T,4,8]", "i32[L]"), ROPE),
    ("rope", ("f32[T,4,8]", "i32[T]"), ROPE | {"kind": "dynamic"}),
    ("rope", ("f32[T,4,8]", "i32[T]"), ROPE | {"kind": "llama3"}),
    ("rope", ("f32[T,4,8]", "i32[T]"), ROPE | {"theta": 0.0}),
    ("embedding", ("i32[T]", "f32[12,8]"), {"first_row": -1, "rows": 12}),
    ("embedding", ("i32[T]", "f32[12,8]"), {"first_row": 1, "rows": 12}),
    ("embedding", ("i32[T]", "f32[12,8]"), {"first_row": 0}),
    ("router", ("f32[T,8]", "f32[6,4]"), _ROUTER),
    ("router", ("f32[T,8]", "bf16[6,8]"), _ROUTER),
    ("router", ("f32[T,8]", "f32[6,8]"), _ROUTER | {"top_k": 7}),
    ("router", ("f32[T,8]", "f32[6,8]"), _ROUTER | {"top_k": 0}),
    ("router", ("f32[T,8]", "f32[6,8]"), _ROUTER | {"softmax": "none"}),
    ("moe_experts", ("f32[T,8]", "f32[T,6]", "f32[6,4,8]", "f32[6,4,8]", "f32[6,4,8]"), _EXPERTS),
    ("moe_experts", ("f32[T,8]", "f32[T,5]", "f32[6,4,8]", "f32[6,4,8]", "f32[6,8,4]"), _EXPERTS),
    ("moe_experts", ("f32[T,8]", "f32[T,6]", "f32[6,4,8]", "f32[6,3,8]", "f32[6,8,4]"), _EXPERTS),
    ("moe_experts", ("f32[T,9]", "f32[T,6]", "f32[6,4,8]", "f32[6,4,8]", "f32[6,8,4]"), _EXPERTS),
    ("moe_experts", ("f32[T,8]", "f32[T,6]", "f32[6,4,8]", "f32[6,4,8]", "f32[6,8,4]"), {"top_k": 2, "experts": 5}),
    ("moe_experts", ("f32[T,8]", "f32[T,6]", "f32[6,4,8]", "f32[6,4,8]", "f32[6,8,4]"), {"top_k": 9, "experts": 8}),
    ("partition", ("f32[T,8]",), {"dim": 1, "first": 4, "end": 9}),
    ("partition", ("f32[T,8]",), {"dim": 1, "first": 4, "end": 4}),
    ("partition", ("f32[T,8]",), {"dim": 0, "first": 0, "end": 1}),
    ("partition", ("f32[T,8]",), {"dim": -1, "first": 0, "end": 1}),
    ("combine", ("f32[T,8]",), {"dim": 1, "ranks": (0, 1), "sizes": (8, 7), "part": 1}),
    ("combine", ("f32[T,8]",), {"dim": 1, "ranks": (0, 1), "sizes": (8,), "part": 0}),
    ("combine", ("f32[T,8]",), {"dim": 1, "ranks": (0, 1), "sizes": (8, 7), "part": 2}),
    ("combine", ("i32[T]",), {"dim": 0, "ranks": (0,), "sizes": (8,), "part": 0}),
    ("reduce", ("f32[T,8]",), {"ranks": (1, 1)}),
    ("reduce", ("f32[T,8]",), {"ranks": ()}),
    ("reduce", ("i32[T]",), {"ranks": (0,)}),
    ("replicate", ("f32[T,8]",), {"ranks": (0, 1), "root": 2, "dtype": "f32", "columns": (8,)}),
    ("replicate", ("f32[T,8]",), {"ranks": (0, 1), "root": 0, "dtype": "f32", "columns": (4,)}),
    ("send", ("f32[T,8]",), {"to": -1, "channel": 0}),
    ("send", ("i32[T]",), {"to": 1, "channel": 0}),
    ("recv", ("i32[T]",), {"source": 0, "channel": -1, "dtype": "f32", "columns": (8,)}),
    ("recv", ("i32[T]",), {"source": 0, "channel": 0, "dtype": "u64", "columns": (8,)}),
    ("recv", ("i32[T]",), {"source": 0, "channel": 0, "dtype": "f32", "columns": (0,)}),
    ("recv", ("f32[T,4]",), {"source": 0, "channel": 0, "dtype": "f32", "columns": (8,)}),
]


@pytest.mark.parametrize(("op", "types", "attrs"), REFUSED)
def test_refusals_show_the_operand_types(op: str, types: tuple[str, ...], attrs: dict[str, Attr]) -> None:
    operands = [t(text) for text in types]
    with pytest.raises(GraphError) as caught:
        record_of(op).shape(operands, attrs)
    assert op in caught.value.found
    assert all(str(kind) in caught.value.found for kind in operands)


@pytest.mark.parametrize(
    ("operand", "bad"),
    [
        (0, "f32[T,3,8]"), (1, "f32[T,2,6]"), (2, "f32[L,2,8]"), (3, "f32[P,32,4,8]"), (4, "bf16[P,32,2,8]"),
        (5, "i64[R1]"), (6, "i32[L]"), (7, "f32[R]"), (8, "i32[B]"), (9, "i64[T,W]"),
    ],
)  # fmt: skip
def test_attention_refuses_each_operand(operand: int, bad: str) -> None:
    case = next(case for case in CASES if case.op == "attention")
    types = [t(bad if i == operand else text) for i, text in enumerate(case.types)]
    with pytest.raises(GraphError, match="attention"):
        record_of("attention").shape(types, case.attrs)
    with pytest.raises(GraphError, match="mode one of"):
        record_of("attention").shape([t(text) for text in case.types], {"scale": 1.0, "mode": "decode"})


def test_exchanges_of_a_group_by_their_references() -> None:
    """A transport gives the operands of all ranks in the group's order; an arriving tensor only needs its rows here."""
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0, 7.0]])
    (joined,) = record_of("combine").reference([a, b], {"dim": 1, "ranks": (4, 2), "sizes": (2, 3), "part": 0})
    assert joined.tolist() == [[1.0, 2.0, 3.0, 5.0, 7.0]]
    half = torch.tensor([256.0], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.bfloat16)
    (total,) = record_of("reduce").reference([half[0], half[1], half[1]], {"ranks": (0, 1, 2)})
    assert total.dtype == torch.bfloat16 and total.item() == 258.0  # 256 + 1 in bfloat16 would stay 256
    attrs: dict[str, Attr] = {"ranks": (4, 2), "root": 2, "dtype": "f32", "columns": (2,)}
    (copied,) = record_of("replicate").reference([torch.zeros(1, dtype=torch.int32), a], attrs)
    assert torch.equal(copied, a)
    for op in ("replicate", "recv"):
        more: dict[str, Attr] = {"source": 0, "channel": 0} if op == "recv" else {}
        assert record_of(op).shape([t("i32[L]")], attrs | more) == (t("f32[L,2]"),)


def test_unknown_operator_names_the_nearest() -> None:
    with pytest.raises(GraphError, match=r"one of .*rms_norm"):
        record_of("rmsnorm")


def test_kernel_keys() -> None:
    keys = {name: record.kernel for name, record in all_records().items()}
    assert keys["attention"] == KernelKey(cpu="attention", triton="tree_attention")
    assert {"add", "swiglu"} <= {name for name, key in keys.items() if key.cpu == "rowwise"}
    assert all((key.expr is not None) == (key.cpu == "rowwise") for key in keys.values())
    assert all(isinstance(record, OpRecord) and record.doc for record in all_records().values())

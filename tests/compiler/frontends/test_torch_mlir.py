"""PyTorch blocks through torch-mlir: differently written blocks have the builder's hash, others are refused by line."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType

import pytest

if importlib.util.find_spec("torch_mlir") is None:
    pytest.skip("torch-mlir is not installed (pip install 'flexspec[import]')", allow_module_level=True)

import torch
import torch_blocks as blocks
from torch import nn
from torch.nn import functional

from flexspec.compiler.frontends.torch_mlir.import_block import BlockInput, import_torch_block
from flexspec.errors import ImportProgramError, ToolchainError
from flexspec.graph import Graph
from flexspec.models.config import ModelConfig
from flexspec.models.llama import build_block
from flexspec.ops.rope import RopeConfig
from flexspec.types import DType

pytestmark = pytest.mark.slow(reason="torch exports modules and torch-mlir reads them")

CONFIG = ModelConfig(
    "llama", 40, blocks.HIDDEN, 1, blocks.HEADS, blocks.KV_HEADS, blocks.HEAD_DIM, blocks.FFN, blocks.EPS,
    blocks.POSITIONS, rope=RopeConfig(theta=blocks.THETA),
)  # fmt: skip
HIDDEN_1TE = BlockInput("hidden", (1, "T", blocks.HIDDEN))
POSITIONS_1T = BlockInput("positions", (1, "T"))
HF_INPUTS = {"x": HIDDEN_1TE, "positions": POSITIONS_1T}
PACKED_INPUTS = {
    "x": BlockInput("hidden", ("T", blocks.HIDDEN)),
    "cos": BlockInput("cos", ("T", blocks.HEAD_DIM // 2)),
    "sin": BlockInput("sin", ("T", blocks.HEAD_DIM // 2)),
}


def load(
    module: nn.Module,
    inputs: dict[str, BlockInput],
    rope: RopeConfig = CONFIG.rope,
    rename: dict[str, str] | None = None,
) -> Graph:
    return import_torch_block(module.eval(), inputs, rope=rope, max_positions=blocks.POSITIONS, rename=rename)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (blocks.HuggingFaceStyle, HF_INPUTS),
        (blocks.PackedStyle, PACKED_INPUTS),
        (blocks.TableStyle, {"x": HIDDEN_1TE}),
        (blocks.InnerFrequencies, {"x": HIDDEN_1TE}),
    ],
)
def test_differently_written_blocks_have_the_builders_hash(
    make: Callable[[], nn.Module], inputs: dict[str, BlockInput]
) -> None:
    graph = load(make(), inputs, rename=getattr(make, "RENAME", None))
    wanted = build_block(CONFIG, DType.F32)
    assert [str(v.type) for v in graph.inputs] == [str(v.type) for v in wanted.inputs]
    assert [v.name for v in graph.inputs] == [v.name for v in wanted.inputs]
    assert graph.hash() == wanted.hash()


def test_biases_and_head_norms_in_bf16() -> None:
    module = blocks.HuggingFaceStyle(bias=True, qk_norm=True)
    for parameter in module.parameters():  # not module.to, which would round the frequencies
        parameter.data = parameter.data.to(torch.bfloat16)
    graph = load(module, HF_INPUTS)
    wanted = build_block(replace(CONFIG, qkv_bias=True, qk_norm=True), DType.BF16)
    assert graph.hash() == wanted.hash()


def test_the_decoder_layer_of_transformers() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        hidden_size=blocks.HIDDEN, intermediate_size=blocks.FFN, num_attention_heads=blocks.HEADS,
        num_key_value_heads=blocks.KV_HEADS, head_dim=blocks.HEAD_DIM, rms_norm_eps=blocks.EPS,
        attn_implementation="sdpa",
    )  # fmt: skip

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = LlamaDecoderLayer(config, 0)

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            out = self.layer(x, position_embeddings=(cos, sin))
            return out if isinstance(out, torch.Tensor) else out[0]

    module = Layer()
    tables = {name: BlockInput(name, (1, "T", blocks.HEAD_DIM)) for name in ("cos", "sin")}
    rename = {path: path.removeprefix("layer.") for path, _ in module.named_modules() if path}
    graph = load(module, {"x": HIDDEN_1TE, **tables}, rename=rename)
    assert graph.hash() == build_block(CONFIG, DType.F32).hash()


def test_another_structure_is_another_hash() -> None:
    class Parallel(blocks.HuggingFaceStyle):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            h = x + self.self_attn(self.input_layernorm(x), positions)
            return h + self.mlp(self.post_attention_layernorm(x))  # reads x, not h

    assert load(Parallel(), HF_INPUTS).hash() != build_block(CONFIG, DType.F32).hash()


class Piece(nn.Module):
    """A part of a block, enough to meet the operator in question."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.proj = nn.Linear(64, 64)


def piece_of(function: FunctionType) -> nn.Module:
    """A Piece with ``function`` as its forward; torch.export keeps the lines of functions of that name only."""
    forward = FunctionType(function.__code__.replace(co_name="forward"), function.__globals__)
    return type("Piece", (Piece,), {"forward": forward})()


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (4, 16)).transpose(0, 1).unsqueeze(0)


def gelu(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return functional.gelu(m.proj(x)) * x


def interleaved(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = heads(x)[..., ::2], heads(x)[..., 1::2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def quarter(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return heads(x)[..., :4]


def other_sign(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    lo, hi = heads(x).chunk(2, -1)
    return torch.cat((lo * cos + hi * sin, hi * cos - lo * sin), -1)


def twice(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    lo, hi = heads(x).chunk(2, -1)
    return lo * cos - hi * sin + lo * cos


def scaled_table(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return heads(x).chunk(2, -1)[0] * (2 * cos)


def truncated(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return m.proj(x.to(torch.int64).to(x.dtype))


def not_causal(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(heads(x), heads(x), heads(x))


def rows_as_heads(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    y = x.unflatten(-1, (4, 16)).unsqueeze(0)
    return functional.scaled_dot_product_attention(y, y, y, is_causal=True)


def unjoined(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return heads(x).flatten(2)  # rows and channels of one head


def plus_one_norm(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * (1 + m.weight)


def norm_of_another(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return m.proj(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def mean_over_rows(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5)


def no_attention(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return m.proj(x)


@pytest.mark.parametrize(
    ("piece", "operator", "expected"),
    [
        (gelu, "aten.gelu", "operators of a Llama-like decoder block"),
        (interleaved, "aten.slice.Tensor", r"halves of the head dim \(pairs d, d \+ D/2\)"),
        (quarter, "aten.slice.Tensor", "one half of the head dim"),
        (other_sign, "aten.cat", r"cat\(lo cos - hi sin, hi cos \+ lo sin\)"),
        (twice, "aten.add.Tensor", "each once"),
        (scaled_table, "aten.mul.Scalar", "tables passed"),
        (truncated, "aten.to.dtype", "floating-point numbers"),
        (not_causal, "aten.scaled_dot_product_attention", "is_causal=True"),
        (rows_as_heads, "aten.scaled_dot_product_attention", "heads first"),
        (unjoined, "aten.flatten.using_ints", "joined again with rows first"),
        (plus_one_norm, "aten.add.Scalar", "no constant can be added"),
        (norm_of_another, "aten.mul.Tensor", "a step of RMSNorm"),
        (mean_over_rows, "aten.mean.dim", "over the last dim"),
        (no_attention, "func.return", "one attention"),
    ],
)
def test_what_has_no_canonical_form_is_refused_by_line(piece: FunctionType, operator: str, expected: str) -> None:
    with pytest.raises(ImportProgramError, match=rf"operator {operator}: .*expected .*{expected}") as refusal:
        load(piece_of(piece), PACKED_INPUTS)
    assert refusal.value.code == "FS205"
    if operator != "func.return":
        first = piece.__code__.co_firstlineno
        line = int(refusal.value.found.removeprefix(f"{__file__}:").split(":")[0])
        assert first < line <= first + 3


def test_frequencies_of_another_rotation_are_refused() -> None:
    with pytest.raises(ImportProgramError, match=r"torch_blocks.py:\d+: torch operator aten.mul.Tensor: frequencies"):
        load(blocks.HuggingFaceStyle(), HF_INPUTS, rope=RopeConfig(theta=500_000.0))
    with pytest.raises(ImportProgramError, match="cos or sin of RopeConfig"):
        load(blocks.TableStyle(), {"x": HIDDEN_1TE}, rope=RopeConfig(theta=500_000.0))
    with pytest.raises(ImportProgramError, match=r"frequencies \[1, 0.31641"):  # rounded to bfloat16
        load(blocks.HuggingFaceStyle().to(torch.bfloat16), HF_INPUTS)


def test_a_program_that_does_not_export_is_refused() -> None:
    def branches(m: Piece, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else m.proj(x)

    with pytest.raises(ImportProgramError, match="torch.export of Piece failed"):
        load(piece_of(branches), PACKED_INPUTS)


def test_inputs_that_describe_no_block_are_refused() -> None:
    with pytest.raises(ImportProgramError, match="one hidden"):
        load(blocks.HuggingFaceStyle(), {"positions": POSITIONS_1T})
    with pytest.raises(ImportProgramError, match="one dim T"):
        load(blocks.HuggingFaceStyle(), HF_INPUTS | {"x": BlockInput("hidden", (1, 8, 64))})
    mixed = blocks.HuggingFaceStyle()
    mixed.mlp.to(torch.bfloat16)
    with pytest.raises(ImportProgramError, match="bfloat16.*float32"):
        load(mixed, HF_INPUTS)


def test_without_torch_mlir_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_mlir", None)
    with pytest.raises(ToolchainError, match=r"pip install 'flexspec\[import\]'"):
        load(blocks.HuggingFaceStyle(), HF_INPUTS)

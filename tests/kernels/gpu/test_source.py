"""The generated Triton source: golden files, the head dim as sums of powers of two, and what a variant may be.

FLEXSPEC_UPDATE_GOLDEN=1 rewrites the golden files; read their diff before committing it.
"""

import ast
import os
from pathlib import Path

import pytest

from flexspec.errors import CompileError
from flexspec.kernels.gpu.attention.variant import (
    ENTRIES,
    AttentionShape,
    AttentionVariant,
    TileConfig,
    candidate_configs,
    dim_parts,
)
from flexspec.kernels.gpu.render import import_source, render
from flexspec.kernels.gpu.targets import TARGETS, target_of
from flexspec.types import DType

GOLDEN = Path(__file__).parents[2] / "golden"
MAIN = (
    (AttentionVariant("tree_verify", 128, 4, 1, DType.BF16, 64), TileConfig(64, 4, 3)),  # Llama 3 8B, Mistral 7B
    (AttentionVariant("tree_verify", 64, 3, 1, DType.BF16, 64), TileConfig(64, 4, 3)),  # SmolLM2 135M
    (
        AttentionVariant("tree_verify", 80, 1, 2, DType.F16, 64),
        TileConfig(32, 4, 2, two_loops=False),
    ),  # two dots, two words
    (AttentionVariant("incremental", 64, 3, 1, DType.F32, 16), TileConfig(32, 4, 3)),  # an SSM's step in float32
)


@pytest.mark.parametrize(("variant", "config"), MAIN, ids=lambda value: value.name)
def test_source_is_golden(variant: AttentionVariant, config: TileConfig) -> None:
    path = GOLDEN / f"{variant.name}.{config.name}.py.txt"
    source = render(variant, config)
    if os.environ.get("FLEXSPEC_UPDATE_GOLDEN") == "1":
        path.write_text(source)
    assert source == path.read_text(), f"{path.name} differs; FLEXSPEC_UPDATE_GOLDEN=1 rewrites it"


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_every_head_dim_renders_to_python(head_dim: int, dtype: DType) -> None:
    for words, two_loops in ((1, True), (3, False)):
        variant = AttentionVariant("tree_verify", head_dim, 3, words, dtype, 32)
        source = render(variant, TileConfig(32, 4, 2, two_loops))
        tree = ast.parse(source)
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert functions == ["fold_keys", "attend", "merge"]
        assert source.count('input_precision="ieee"') == (2 * len(dim_parts(head_dim)) if dtype is DType.F32 else 0)
        assert max(map(len, source.splitlines())) <= 140


def test_kernel_arguments_stand_in_the_order_of_the_abi() -> None:
    source = render(*MAIN[0])
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for entry in ENTRIES:
        names = [argument.arg for argument in functions[entry.name].args.args]
        assert names == [name for name, _ in entry.signature(DType.BF16)]


@pytest.mark.parametrize(
    ("head_dim", "widths"),
    [(16, [16]), (80, [64, 16]), (96, [64, 32]), (112, [64, 32, 16]), (192, [128, 64]), (256, [256])],
)
def test_head_dim_is_a_sum_of_powers_of_two(head_dim: int, widths: list[int]) -> None:
    parts = dim_parts(head_dim)
    assert [width for _, width in parts] == widths
    assert [offset for offset, _ in parts] == [sum(widths[:i]) for i in range(len(widths))]


def test_same_text_is_imported_once_and_other_text_apart(tmp_path: Path) -> None:
    source = '"""A module without kernels."""\nVALUE = 1\n'
    first = import_source(source, tmp_path)
    assert import_source(source, tmp_path) is first
    assert import_source(source.replace("1", "2"), tmp_path).VALUE == 2 and first.VALUE == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"mode": "sideways"}, "mode"),
        ({"head_dim": 72}, "head_dim 72"),
        ({"head_dim": 512}, "head_dim 512"),
        ({"mask_words": 9}, "mask_words 9"),
        ({"dtype": DType.I32}, "dtype i32"),
        ({"row_tile": 48}, "row_tile 48"),
        ({"group": 32}, "row_tile 16 for a group of 32"),
        ({"page_tokens": 24}, "page_tokens 24"),
    ],
)
def test_variant_outside_the_limits_is_refused(change: dict[str, object], word: str) -> None:
    fields = {"mode": "tree_verify", "head_dim": 64, "group": 1, "mask_words": 1, "dtype": DType.F32, "row_tile": 16}
    with pytest.raises(CompileError, match=word) as caught:
        AttentionVariant(**(fields | change))  # type: ignore[arg-type]
    assert caught.value.code == "FS301"


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (AttentionShape("tree_verify", 32, 8, 128, DType.BF16, 64), "tree_verify_d128_g4_w1_p32_r64_bf16"),
        (AttentionShape("tree_verify", 9, 3, 64, DType.BF16, 4), "tree_verify_d64_g3_w1_p32_r16_bf16"),
        (AttentionShape("tree_verify", 32, 32, 128, DType.F16, 200), "tree_verify_d128_g1_w4_p32_r64_f16"),
        (AttentionShape("tree_verify", 32, 8, 128, DType.F32, 64), "tree_verify_d128_g4_w1_p32_r16_f32"),
        (AttentionShape("incremental", 32, 1, 64, DType.BF16, 1), "incremental_d64_g32_w1_p32_r32_bf16"),
    ],
)
def test_shape_of_a_model_names_its_variant(shape: AttentionShape, name: str) -> None:
    assert shape.variant().name == name


def test_shape_whose_heads_do_not_divide_and_unknown_targets_are_refused() -> None:
    with pytest.raises(CompileError, match="9 query heads over 2 kv heads"):
        AttentionShape("tree_verify", 9, 2, 64, DType.BF16, 16).variant()
    with pytest.raises(CompileError, match="sm_90"):
        target_of("sm_91")


def test_float32_and_wide_heads_start_with_narrow_key_blocks() -> None:
    target = TARGETS["sm_90"]
    wide = candidate_configs(AttentionVariant("tree_verify", 128, 4, 1, DType.BF16, 64), target)
    assert wide[0].block_keys == 64 and len(set(wide)) == len(wide)
    for variant in (
        AttentionVariant("tree_verify", 256, 4, 1, DType.BF16, 64),
        AttentionVariant("tree_verify", 64, 4, 1, DType.F32, 64),
    ):
        assert max(config.block_keys for config in candidate_configs(variant, target)) == 32

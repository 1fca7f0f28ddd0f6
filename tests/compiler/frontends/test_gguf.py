"""GGUF files: configuration, names, rotary order, dequantisation, and one clear error for each kind of bad file."""

from __future__ import annotations

import hashlib
import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from tiny_models import HEAD_DIM, LAYERS, byte_level_tokens, gguf_name, random_weights, write_gguf

from flexspec.compiler.frontends.open_model import check_weights, open_model
from flexspec.compiler.frontends.rope_settings import llama3_factors
from flexspec.errors import FlexspecError, ModelConfigError, ModelFileError, TokenizerError, WeightError
from flexspec.models.registry import build_model, expected_weights
from flexspec.ops.rope import RopeConfig
from flexspec.types import DType

VOCAB = len(byte_level_tokens())


def test_llama_file_opens_as_the_model_it_was_made_from(tmp_path: Path) -> None:
    weights = random_weights(VOCAB)
    path = write_gguf(tmp_path / "m.gguf", weights)
    model = open_model(path)
    config = model.config
    assert (config.family, config.vocab_size, config.hidden_size, config.layers) == ("llama", VOCAB, 64, LAYERS)
    assert (config.heads, config.kv_heads, config.head_dim, config.ffn_size) == (4, 2, HEAD_DIM, 96)
    assert (config.norm_eps, config.max_positions, config.rope) == (1e-5, 256, RopeConfig())
    assert (config.tied_embeddings, config.qkv_bias, config.qk_norm) == (True, False, False)
    assert (config.bos_id, config.eos_ids) == (1, (2, 0))  # <|im_end|>, then <|endoftext|> by its text
    assert model.name == "tiny"
    assert model.source_hash == hashlib.sha256(path.read_bytes()).hexdigest()
    assert model.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    check_weights(model.weights, expected_weights(build_model(config, DType.F32)), path)
    for name, array in weights.items():  # among them q and k, which the file holds in interleaved order
        np.testing.assert_array_equal(model.weights.get(name), array, err_msg=name)


def test_interleaved_rows_are_put_back(tmp_path: Path) -> None:
    weights = random_weights(VOCAB)
    path = write_gguf(tmp_path / "m.gguf", weights)
    reader = gguf.GGUFReader(path)
    stored = next(t for t in reader.tensors if t.name == "blk.0.attn_q.weight").data
    q_proj = weights["layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(stored[:2], q_proj[[0, HEAD_DIM // 2]])  # a pair is two neighbours in the file
    np.testing.assert_array_equal(open_model(path).weights.get("layers.0.self_attn.q_proj.weight"), q_proj)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_rows_are_left_alone(tmp_path: Path, arch: str) -> None:
    weights = random_weights(VOCAB)
    weights["lm_head.weight"] = weights["embed_tokens.weight"] + 1
    rng = np.random.default_rng(1)
    for i in range(LAYERS):
        for part, rows in (("q", 64), ("k", 32), ("v", 32)):
            if arch == "qwen2":
                weights[f"layers.{i}.self_attn.{part}_proj.bias"] = rng.standard_normal(rows).astype(np.float32)
            elif part != "v":
                weights[f"layers.{i}.self_attn.{part}_norm.weight"] = np.ones(HEAD_DIM, np.float32)
    path = write_gguf(tmp_path / "m.gguf", weights, arch=arch, pre="qwen2")
    model = open_model(path)
    assert model.config.family == arch
    assert (model.config.qkv_bias, model.config.qk_norm) == (arch == "qwen2", arch == "qwen3")
    assert not model.config.tied_embeddings
    check_weights(model.weights, expected_weights(build_model(model.config, DType.F32)), path)
    for name, array in weights.items():
        np.testing.assert_array_equal(model.weights.get(name), array, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 0.03), ("Q4_0", 0.5), ("Q4_1", 0.3), ("Q5_0", 0.3), ("Q5_1", 0.2)],
)
def test_types_dequantise_close_to_the_original(tmp_path: Path, kind: str, tolerance: float) -> None:
    weights = random_weights(VOCAB)
    name = "layers.1.mlp.gate_proj.weight"
    path = write_gguf(tmp_path / "m.gguf", weights, types={name: Type[kind]})
    got = open_model(path).weights.get(name)
    assert got.dtype == np.float32 and got.shape == weights[name].shape
    assert 0 < np.abs(got - weights[name]).max() < tolerance * 2  # lossy, so not the original itself
    assert np.abs(got - weights[name]).mean() < tolerance / 2


def test_bf16_widens_exactly(tmp_path: Path) -> None:
    weights = random_weights(VOCAB)
    name = "layers.0.mlp.up_proj.weight"
    path = write_gguf(tmp_path / "m.gguf", weights, types={name: Type.BF16})
    bits = weights[name].view(np.uint32).astype(np.uint64)
    rounded = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(open_model(path).weights.get(name), rounded)


def test_k_quants_follow_the_format(tmp_path: Path) -> None:
    """One block of Q6_K and of Q4_K with all quants, scales and offsets chosen, against the definitions in ggml."""
    rng = np.random.default_rng(3)
    weights = random_weights(VOCAB, hidden=256, ffn=256)
    writer_types = {"layers.0.mlp.gate_proj.weight": (Type.Q6_K, 210), "layers.0.mlp.up_proj.weight": (Type.Q4_K, 144)}
    path = write_gguf(tmp_path / "m.gguf", weights)
    raw = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gguf.quants,
            "quantize",
            lambda array, kind: rng.integers(0, 60, (256, dict(writer_types.values())[kind]), np.uint8),
        )
        write_gguf(path, weights, types={name: kind for name, (kind, _) in writer_types.items()})
    for tensor in gguf.GGUFReader(path).tensors:
        raw[tensor.name] = np.array(tensor.data)
    model = open_model(path)
    row = model.weights.get("layers.0.mlp.gate_proj.weight")[5]
    block = raw["blk.0.ffn_gate.weight"][5]
    low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
    scale = float(block[208:210].view(np.float16)[0])
    for i in range(256):  # ggml-quants.c, dequantize_row_q6_K: halves of 128, quarters of 32
        half, quarter, at = i // 128, i % 128 // 32, i % 32
        nibble = low[half * 64 + (quarter % 2) * 32 + at] >> (4 * (quarter // 2)) & 15
        bits = high[half * 32 + at] >> (2 * quarter) & 3
        assert row[i] == np.float32(scale * scales[half * 8 + quarter * 2 + at // 16]) * (int(nibble | bits << 4) - 32)
    row = model.weights.get("layers.0.mlp.up_proj.weight")[7]
    block = raw["blk.0.ffn_up.weight"][7]
    d, dmin = (np.float32(x) for x in block[:4].view(np.float16))
    packed = block[4:16]
    for i in range(256):  # dequantize_row_q4_K with get_scale_min_k4
        j = i // 32
        if j < 4:
            factor, offset = packed[j] & 63, packed[j + 4] & 63
        else:
            factor = packed[j + 4] & 15 | packed[j - 4] >> 6 << 4
            offset = packed[j + 4] >> 4 | packed[j] >> 6 << 4
        quant = block[16 + j // 2 * 32 + i % 32] >> (4 * (j % 2)) & 15
        assert row[i] == d * np.float32(factor) * np.float32(quant) - dmin * np.float32(offset)


def test_rope_scaling_in_metadata(tmp_path: Path) -> None:
    weights = random_weights(VOCAB)
    path = tmp_path / "m.gguf"

    def rope(**numbers: int | float | str) -> RopeConfig:
        named = {f"rope.scaling.{key}": value for key, value in numbers.items()}
        return open_model(write_gguf(path, weights, numbers=named)).config.rope

    assert rope(type="none") == RopeConfig()
    assert rope(type="linear", factor=2.0) == RopeConfig(kind="linear", factor=2.0)
    yarn = rope(type="yarn", factor=4.0, original_context_length=64)
    assert yarn == RopeConfig(kind="yarn", factor=4.0, original_max_positions=64)
    with pytest.raises(ModelConfigError, match="longrope"):
        rope(type="longrope", factor=4.0)


def test_llama3_factors_are_recognised(tmp_path: Path) -> None:
    rope = RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 64)
    numbers = {"rope.freq_base": 500_000.0, "attention.key_length": 64, "attention.value_length": 64}
    weights = random_weights(VOCAB)
    path = tmp_path / "m.gguf"
    factors = llama3_factors(rope, 64).astype(np.float32)
    write_gguf(path, weights, numbers=numbers, extra_tensors={"rope_freqs.weight": factors})
    assert open_model(path).config.rope == rope
    assert "rope_freqs.weight" not in set(open_model(path).weights.names())
    factors[20] *= 1.01
    write_gguf(path, weights, numbers=numbers, extra_tensors={"rope_freqs.weight": factors})
    with pytest.raises(ModelConfigError, match="rope_freqs.weight"):
        open_model(path)


@pytest.mark.parametrize("original", [8192, 4096])
@pytest.mark.parametrize(("factor", "high", "head_dim"), [(8.0, 4.0, 128), (32.0, 4.0, 64), (16.0, 6.0, 128)])
def test_llama3_fit_gives_the_parameters_back(original: int, factor: float, high: float, head_dim: int) -> None:
    from flexspec.compiler.frontends.rope_settings import rope_from_factors

    rope = RopeConfig(500_000.0, "llama3", factor, 1.0, high, original)
    factors = llama3_factors(rope, head_dim).astype(np.float32)
    assert rope_from_factors(factors, 500_000.0, head_dim, Path("m.gguf")) == rope


def test_refused_models(tmp_path: Path) -> None:
    weights = random_weights(VOCAB)
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelConfigError, match="gemma"):
        open_model(write_gguf(path, weights, arch="gemma"))
    with pytest.raises(ModelConfigError, match="expert_count"):
        open_model(write_gguf(path, weights, numbers={"expert_count": 8}))
    with pytest.raises(ModelConfigError, match="sliding_window=128"):
        open_model(write_gguf(path, weights, numbers={"attention.sliding_window": 128}))
    assert open_model(write_gguf(path, weights, numbers={"attention.sliding_window": 256})).config.max_positions == 256
    with pytest.raises(ModelConfigError, match="4 query heads over 3"):
        open_model(write_gguf(path, weights, numbers={"attention.head_count_kv": 3}))
    with pytest.raises(WeightError, match="2"):
        open_model(write_gguf(path, weights, numbers={"block_count": 3}))
    with pytest.raises(TokenizerError, match="unheard-of"):
        open_model(write_gguf(path, weights, pre="unheard-of"))
    with pytest.raises(TokenizerError, match="bert"):
        open_model(write_gguf(path, weights, tokenizer="bert"))
    with pytest.raises(WeightError, match="IQ4_NL"):
        name = "layers.0.mlp.up_proj.weight"
        file = write_gguf(path, weights, types={name: Type.Q4_0})
        data = file.read_bytes()  # Q4_0 and IQ4_NL blocks have the same size
        at = data.index(gguf_name(name).encode()) + len(gguf_name(name)) + 4 + 16
        assert data[at : at + 4] == struct.pack("<I", Type.Q4_0)
        file.write_bytes(data[:at] + struct.pack("<I", Type.IQ4_NL) + data[at + 4 :])
        open_model(file).weights.get(name)


def test_weights_must_be_all_and_only_the_models(tmp_path: Path) -> None:
    weights = random_weights(VOCAB)
    expected = {name: array.shape for name, array in weights.items()}
    path = tmp_path / "m.gguf"

    def check(changed: dict[str, np.ndarray], **more: np.ndarray) -> None:
        check_weights(open_model(write_gguf(path, changed, extra_tensors=more)).weights, expected, path)

    check(weights)
    missing = {name: array for name, array in weights.items() if name != "layers.1.mlp.up_proj.weight"}
    with pytest.raises(WeightError, match=r"lacks layers\.1\.mlp\.up_proj\.weight"):
        check(missing)
    with pytest.raises(WeightError, match="has odd that the model does not use"):
        check(weights, odd=np.ones(4, np.float32))
    with pytest.raises(WeightError, match=r"norm\.weight \[32\] instead of \[64\]"):
        check(weights | {"norm.weight": np.ones(32, np.float32)})
    with pytest.raises(WeightError, match="twice"):
        check(weights, **{"norm.weight": np.ones(64, np.float32)})  # beside output_norm.weight
    bad = weights["norm.weight"].copy()
    bad[3] = np.nan
    model = open_model(write_gguf(path, weights | {"norm.weight": bad}))
    with pytest.raises(WeightError, match=r"norm\.weight.*nan at element 3"):
        model.weights.get("norm.weight")


def test_wrong_files(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_weights(VOCAB))
    whole = path.read_bytes()
    for data, message in [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"PK\x03\x04" + bytes(100), "zip archive"),
        (b"\x80\x02ctorch", "pickle"),
        (b"hello", "an unknown format"),
        (b"<!DOCTYPE html>", "web page"),
        (struct.pack("<Q", 10) + b"{" + bytes(20), "safetensors"),
        (whole[:3], "an unknown format"),
        (whole[:20], "ends within the metadata count"),
        (whole[: len(whole) // 2], "truncated"),
        (whole[:-1], "truncated"),
        (whole[:4] + struct.pack("<I", 1) + whole[8:], "version 1"),
        (whole[:4] + struct.pack(">I", 3) + whole[8:], "big-endian"),
    ]:
        path.write_bytes(data)
        with pytest.raises(ModelFileError, match=message):
            open_model(path)
    with pytest.raises(ModelFileError, match="does not exist"):
        open_model(tmp_path / "none.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):  # opening it would wait for ever
        open_model(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="cannot be read"):
        open_model(tmp_path / ("x" * 5000))
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ModelFileError, match="no config.json"):
        open_model(tmp_path / "folder.gguf")


def test_a_file_cut_after_opening_is_an_error_not_a_signal(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_weights(VOCAB))
    model = open_model(path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelFileError, match="ends before byte"):
        for name in model.weights.names():
            model.weights.get(name)


@pytest.mark.parametrize("offset", [8, 16])
def test_huge_counts_take_no_memory(tmp_path: Path, offset: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_weights(VOCAB))
    data = bytearray(path.read_bytes())
    data[offset : offset + 8] = struct.pack("<Q", 1 << 60)
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(FlexspecError):
            open_model(path)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()

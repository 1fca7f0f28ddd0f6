"""Hugging Face folders: every configuration form, exact widening, shards, SSM folders, and the bad files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import (
    TEMPLATE,
    random_weights,
    stored_f32,
    write_huggingface,
    write_safetensors,
)

from flexspec.compiler.frontends.huggingface import FUSED_STATE
from flexspec.compiler.frontends.open_model import check_weights, open_model
from flexspec.errors import FlexspecError, ModelConfigError, ModelFileError, TokenizerError, WeightError
from flexspec.models.registry import architectures, build_model, expected_weights
from flexspec.ops.rope import RopeConfig
from flexspec.types import DType

VOCAB = 300
NOT_IN_TRANSFORMERS = {FUSED_STATE}


def open_with(tmp_path: Path, **settings: Any) -> Any:
    return open_model(write_huggingface(tmp_path / "tiny", random_weights(VOCAB), **settings)).config


def test_folder_opens_as_the_model_it_was_made_from(tmp_path: Path) -> None:
    weights = random_weights(VOCAB)
    folder = write_huggingface(tmp_path / "tiny", weights)
    model = open_model(folder)
    assert (model.name, model.config.family, model.config.eos_ids, model.config.bos_id) == ("tiny", "llama", (2,), 1)
    assert (model.tokenizer_json, model.chat_template) == (None, None)
    check_weights(model.weights, expected_weights(build_model(model.config, DType.F32)), folder)
    for name, array in weights.items():
        np.testing.assert_array_equal(model.weights.get(name), array)
    before = model.source_hash
    assert open_model(folder).source_hash == before
    write_huggingface(folder, weights, rms_norm_eps=1e-6)
    assert open_model(folder).source_hash != before


@pytest.mark.parametrize("architecture", sorted(architectures().keys() - NOT_IN_TRANSFORMERS))
@pytest.mark.parametrize("bare", [True, False])
def test_configuration_agrees_with_transformers(tmp_path: Path, architecture: str, bare: bool) -> None:
    """With all keys written and with only the required ones, where transformers' defaults must be ours."""
    import transformers

    kind, family = architecture.removesuffix("ForCausalLM"), architectures()[architecture][0]
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "sliding_window": None, "num_key_value_heads": 2}
    theirs = getattr(transformers, f"{kind}Config")(**sizes, architectures=[architecture])
    folder = write_huggingface(tmp_path / "tiny", random_weights(VOCAB))
    if bare:
        (folder / "config.json").write_text(json.dumps(sizes | {"architectures": [architecture]}))
    else:
        theirs.save_pretrained(folder)
    ours = open_model(folder).config
    assert ours.family == family
    assert (ours.kv_heads, ours.max_positions) == (theirs.num_key_value_heads, theirs.max_position_embeddings)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert (ours.norm_eps, ours.tied_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    if hasattr(theirs, "rope_parameters"):  # positions may be learned
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    with_bias = bool(getattr(theirs, "attention_bias", False))
    assert (ours.qkv_bias, ours.output_bias, ours.qk_norm) == (
        family == "qwen2" or with_bias,
        with_bias,
        family.startswith("qwen3"),
    )
    if hasattr(theirs, "num_experts_per_tok"):
        assert (ours.experts, ours.experts_per_token) == (theirs.num_experts, theirs.num_experts_per_tok)
        assert ours.expert_ffn_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert ours.normalize_routing == getattr(theirs, "norm_topk_prob", True)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def scaling(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_scaling": {"type": kind, "factor": 4.0} | settings}


def parameters(kind: str, theta: float, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta} | settings, "rope_theta": None}


def yarn(original: int = 256, attention: float = 0.0) -> RopeConfig:
    return RopeConfig(kind="yarn", factor=4.0, original_max_positions=original, attention_factor=attention)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        (scaling("linear"), RopeConfig(kind="linear", factor=4.0)),
        (scaling("linear", rope_type="linear", factor=4), RopeConfig(kind="linear", factor=4.0)),
        ({"rope_scaling": {"rope_type": "llama3"} | LLAMA3}, RopeConfig(1e4, "llama3", 8.0, 1.0, 4.0, 64)),
        (parameters("llama3", 5e5, **LLAMA3), RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)),
        (parameters("default", 7.0), RopeConfig(theta=7.0)),
        (scaling("yarn", original_max_position_embeddings=64), yarn(64)),
        (scaling("yarn"), yarn()),
        (scaling("yarn", attention_factor=1.5), yarn(attention=1.5)),
        (scaling("yarn", mscale=1.0, mscale_all_dim=1.0), yarn(attention=1.0)),
    ],
)
def test_rope_keys_old_and_new(tmp_path: Path, settings: dict[str, Any], expected: RopeConfig) -> None:
    assert open_with(tmp_path, **settings).rope == expected


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 64}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [], "long_factor": []}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "no factor"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor = 'x'"),
        ({"rope_scaling": 3}, "rope_scaling = 3"),
        ({"partial_rotary_factor": 0.5}, "rotation of the whole head"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "no architectures"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_size": True}, "hidden_size = True"),
        ({"hidden_size": -64}, "hidden_size = -64"),
        ({"num_attention_heads": 3}, "divisor"),
        ({"num_key_value_heads": 3}, "4 query heads over 3"),
        ({"num_hidden_layers": 2**31 - 1}, "2147483647 layers but holds weights of 2"),
        ({"max_position_embeddings": 2**31 - 1}, "context of 2147483647"),
        ({"eos_token_id": VOCAB}, "special tokens"),
        ({"eos_token_id": "2"}, "eos_token_id = '2'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, "sliding_window=128"),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}, "sliding_window=4096"),
        ({"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 1} | QWEN_WINDOW, "window=64"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"] * 2} | QWEN_WINDOW, "window=64"),
    ],
)
def test_refused_configurations(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelConfigError, WeightError), match=message):
        open_with(tmp_path, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": 256},
        {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 4096},
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 64},
        {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 2,
        },
        {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 64, "layer_types": ["full_attention"] * 2},
    ],
)
def test_unused_windows_are_accepted(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert open_with(tmp_path, **settings).layers == 2


def test_mistral_with_an_explicit_null_window(tmp_path: Path) -> None:
    folder = write_huggingface(tmp_path / "tiny", random_weights(VOCAB), architectures=["MistralForCausalLM"])
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"sliding_window": None, "max_position_embeddings": 32768})
    )
    assert open_model(folder).config.max_positions == 32768


def test_generation_config_and_tokenizer_files(tmp_path: Path) -> None:
    folder = write_huggingface(tmp_path / "tiny", random_weights(VOCAB))
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    (folder / "tokenizer.json").write_text('{"model": {}}')
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": TEMPLATE}]
    special = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named} | special))
    model = open_model(folder)
    assert model.config.eos_ids == (5, 2)
    assert model.tokenizer_json == b'{"model": {}}'
    assert model.chat_template == TEMPLATE
    assert model.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "chat_template.jinja").write_text("from the file")
    assert open_model(folder).chat_template == "from the file"
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(TokenizerError, match="SentencePiece"):
        open_model(folder)


def test_half_types_widen_exactly(tmp_path: Path) -> None:
    """Every finite bfloat16 and float16 value, and float64 where float32 holds it."""
    folder = write_huggingface(tmp_path / "tiny", random_weights(VOCAB))
    bits = np.arange(1 << 16, dtype=np.uint16)
    bf16 = bits[(bits >> 7 & 0xFF) != 0xFF]
    f16 = bits[(bits >> 10 & 0x1F) != 0x1F]
    tensors = stored_f32(random_weights(VOCAB)) | {
        "model.bf16": ("BF16", bf16.shape, bf16.tobytes()),
        "model.f16": ("F16", f16.shape, f16.tobytes()),
        "model.f64": ("F64", (2, 1), np.array([0.5, -3.0]).tobytes()),
        "model.big": ("F64", (1,), np.array([1e300]).tobytes()),
        "model.int": ("I64", (1,), bytes(8)),
        "model.fp8": ("F8_E4M3", (4,), bytes(4)),
    }
    write_safetensors(folder / "model.safetensors", tensors)
    weights = open_model(folder).weights
    torch = pytest.importorskip("torch")
    for name, kept, kind in (("bf16", bf16, torch.bfloat16), ("f16", f16, torch.float16)):
        theirs = torch.from_numpy(kept.view(np.int16).copy()).view(kind).float().numpy()
        np.testing.assert_array_equal(weights.get(name).view(np.uint32), theirs.view(np.uint32))
    np.testing.assert_array_equal(weights.get("f64"), np.array([[0.5], [-3.0]], np.float32))
    with pytest.raises(WeightError, match="inf"):
        weights.get("big")
    for name in ("int", "fp8"):
        with pytest.raises(WeightError, match="dtype"):
            weights.get(name)


def write_shards(folder: Path) -> dict[str, str]:
    tensors = stored_f32(random_weights(VOCAB))
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a-of-2.safetensors": names[:7], "b-of-2.safetensors": names[7:]}
    for file, part in files.items():
        write_safetensors(folder / file, {name: tensors[name] for name in part})
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards(tmp_path: Path) -> None:
    weights = random_weights(VOCAB)
    folder = write_huggingface(tmp_path / "tiny", weights)
    weight_map = write_shards(folder)
    model = open_model(folder)
    check_weights(model.weights, expected_weights(build_model(model.config, DType.F32)), folder)
    for name, array in weights.items():
        np.testing.assert_array_equal(model.weights.get(name), array)
    index = folder / "model.safetensors.index.json"
    first = min(weight_map)

    def reindex(changed: dict[str, Any]) -> None:
        index.write_text(json.dumps({"weight_map": changed}))

    for changed, error, message in [
        ({k: v for k, v in weight_map.items() if k != first}, WeightError, "does not list"),
        (weight_map | {"model.more": "a-of-2.safetensors"}, WeightError, "lacks tensor 'model.more'"),
        (weight_map | {first: "b-of-2.safetensors"}, WeightError, "lacks tensor"),
        (weight_map | {first: "../tiny/a-of-2.safetensors"}, ModelFileError, "same folder"),
        (weight_map | {first: "c-of-2.safetensors"}, ModelFileError, "does not exist"),
        ({}, ModelFileError, "no weight_map"),
    ]:
        reindex(changed)
        with pytest.raises(error, match=message):
            open_model(folder)
    reindex(weight_map)
    (folder / "b-of-2.safetensors").rename(folder / "b.safetensors")
    with pytest.raises(ModelFileError, match=r"b-of-2\.safetensors does not exist"):
        open_model(folder)


@pytest.mark.parametrize("cut", [0, 4, 100, 3000, -1])
def test_cut_shards_name_the_file(tmp_path: Path, cut: int) -> None:
    folder = write_huggingface(tmp_path / "tiny", random_weights(VOCAB))
    write_shards(folder)
    path = folder / "b-of-2.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelFileError, match=r"b-of-2\.safetensors"):
        open_model(folder)


def test_tied_heads_must_be_equal(tmp_path: Path) -> None:
    weights = random_weights(VOCAB)
    expected = {name: array.shape for name, array in weights.items()}
    stored = stored_f32(weights)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", (8,), bytes(32))
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    folder = write_huggingface(tmp_path / "tiny", weights)
    write_safetensors(folder / "model.safetensors", stored)
    check_weights(open_model(folder).weights, expected, folder)
    stored["lm_head.weight"] = ("F32", (VOCAB, 64), bytes(VOCAB * 64 * 4))
    write_safetensors(folder / "model.safetensors", stored)
    with pytest.raises(WeightError, match="unlike its embedding"):
        check_weights(open_model(folder).weights, expected, folder)


def test_wrong_folders(tmp_path: Path) -> None:
    folder = write_huggingface(tmp_path / "tiny", random_weights(VOCAB))
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])

    def with_header(text: str) -> bytes:
        return len(text.encode()).to_bytes(8, "little") + text.encode() + whole[8 + length :]

    def with_entry(**changed: Any) -> bytes:
        name = "model.norm.weight"
        return with_header(json.dumps(header | {name: header[name] | changed}))

    for data in [
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        whole[:5],
        whole[:-1],
        whole + b"\0",
        bytes([255] * 8) + whole[8:],
        with_header("[]"),
        with_header("{"),
        with_header("[" * 100_000),
        with_header('{"a": 1}'),
        with_header('{"a": {}, "a": {}}'),
        with_header('{"n": ' + "9" * 5000 + "}"),
        with_entry(dtype="F33"),
        with_entry(dtype="F16"),
        with_entry(shape=[-64]),
        with_entry(shape=[2**60, 2**60]),
        with_entry(shape="x"),
        with_entry(data_offsets=[0, 10**9]),
        with_entry(data_offsets=[0, 256]),
        with_entry(data_offsets=[256, 0]),
        with_entry(data_offsets=[0]),
    ]:
        path.write_bytes(data)
        with pytest.raises(ModelFileError, match=r"model\.safetensors"):
            open_model(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelFileError, match="is a directory"):
        open_model(folder)
    path.rmdir()
    with pytest.raises(ModelFileError, match=r"no model\.safetensors"):
        open_model(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(ModelFileError, match="pickled"):
        open_model(folder)
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelFileError, match=r"config\.json is not valid JSON"):
        open_model(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelFileError, match="JSON list"):
        open_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        open_model(folder)


def test_ssm_folder(tmp_path: Path) -> None:
    weights = random_weights(VOCAB)
    folder = write_huggingface(
        tmp_path / "ssm", weights, architectures=["FusedStateSSM"], reduced_vocab_size=4, tap_layers=[8, 18]
    )
    with pytest.raises(WeightError, match="no keep_ids"):
        open_model(folder)
    keep = np.array([0, 7, 9, 299])
    write_safetensors(folder / "vocab_map.safetensors", {"keep_ids": ("I64", (4,), keep.tobytes())})
    model = open_model(folder)
    assert model.fused is not None and model.config.family == "fused_state"
    assert (model.fused.tap_layers, model.fused.reduced_vocab_size) == ((8, 18), 4)
    np.testing.assert_array_equal(model.fused.keep_ids, keep.astype(np.int32))
    (folder / "vocab_map.safetensors").unlink()
    inside = stored_f32(weights) | {"keep_ids": ("I32", (4,), keep.astype(np.int32).tobytes())}
    write_safetensors(folder / "model.safetensors", inside)
    model = open_model(folder)
    assert model.fused is not None
    np.testing.assert_array_equal(model.fused.keep_ids, keep)
    assert "keep_ids" not in set(model.weights.names())
    for bad in ([0, 7, 7, 9], [0, 7, 9, 300], [-1, 7, 8, 9]):
        write_safetensors(folder / "vocab_map.safetensors", {"keep_ids": ("I64", (4,), np.array(bad).tobytes())})
        with pytest.raises(FlexspecError, match="different ids below 300"):
            open_model(folder)


def test_a_family_may_call_the_keys_of_config_json_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors name the key as the file has it."""
    family, rules = architectures()["LlamaForCausalLM"]
    table = dict(architectures()) | {"ToyForCausalLM": (family, replace(rules, keys={"intermediate_size": "ffn_dim"}))}
    monkeypatch.setattr("flexspec.models.registry._ARCHITECTURES", table)
    usual = open_with(tmp_path)
    toy = {"architectures": ["ToyForCausalLM"], "intermediate_size": None}
    assert open_with(tmp_path, ffn_dim=usual.ffn_size, **toy) == usual
    with pytest.raises(ModelConfigError, match="has no ffn_dim"):
        open_with(tmp_path, **toy)

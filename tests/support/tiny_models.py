"""Tiny checkpoints for loader tests: GGUF files, Hugging Face folders, and the two kinds of tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def byte_alphabet() -> list[str]:
    """The 256 printable characters of byte-level BPE, in code point order of the characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]


BYTE_MERGES = ["h e", "l l", "he ll", "hell o", "Ġ t", "1 2", "Ġ w", "ð Ł", "Ã ©"]


def byte_level_tokens() -> list[str]:
    return [*SPECIALS, *byte_alphabet(), *(merge.replace(" ", "") for merge in BYTE_MERGES)]


SPM_PIECES = ["▁", "h", "e", "l", "o", "w", "r", "d", "1", "2", "é", "ll", "he", "hell", "hello", "▁hello", "▁h", "12"]


def sentencepiece_tokens() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a small SentencePiece BPE vocabulary with byte fallback."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_PIECES]
    merged = [piece for piece in SPM_PIECES if len(piece) > 1]
    scores = [-float(merged.index(token)) if token in merged else -1000.0 for token in tokens]
    types = [2, 3, 3, *[6] * 256, *[1] * len(SPM_PIECES)]
    return tokens, scores, types


def random_weights(vocab: int, *, seed: int = 0, hidden: int = HIDDEN, ffn: int = FFN) -> Weights:
    """Weights of a tied Llama under canonical names; the head dim is ``HEAD_DIM`` whatever ``hidden`` is."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab, hidden), "norm.weight": (hidden,)}
    for i in range(LAYERS):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, HEADS * HEAD_DIM),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.mlp.gate_proj.weight": (ffn, hidden),
            f"layers.{i}.mlp.up_proj.weight": (ffn, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, ffn),
        }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


_GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem == "norm":
        return f"output_norm.{kind}"
    if stem.startswith("layers."):
        _, index, inner = stem.split(".", 2)
        return f"blk.{index}.{_GGUF_NAMES[inner]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def llama_cpp_permute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py: half-split rotary pairs to interleaved ones."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def write_gguf(
    path: Path,
    weights: Weights,
    *,
    arch: str = "llama",
    tokenizer: str = "gpt2",
    pre: str = "smollm",
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    numbers: Mapping[str, int | float | str] | None = None,
    extra_tensors: Weights | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it. ``numbers`` adds or replaces metadata under ``arch.``."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    settings: dict[str, int | float | str] = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": weights["embed_tokens.weight"].shape[1],
        "feed_forward_length": weights["layers.0.mlp.gate_proj.weight"].shape[0],
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    for key, value in (settings | dict(numbers or {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{arch}.{key}", value)
    _add_tokenizer(writer, tokenizer, pre)
    for name, array in weights.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        if arch == "llama" and heads:
            array = llama_cpp_permute(array, heads)
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(gguf_name(name), array)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, kind: str, pre: str) -> None:
    if kind == "none":
        return
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        tokens = byte_level_tokens()
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
        writer.add_token_merges(BYTE_MERGES)
    else:
        tokens, scores, types = sentencepiece_tokens()
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """A safetensors file from (dtype, shape, raw bytes), so that bfloat16 needs no library."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))
    return path


def stored_f32(weights: Weights) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The form ``write_safetensors`` takes, with Hugging Face's names."""
    return {
        name if name.startswith("lm_head") else f"model.{name}": ("F32", array.shape, array.tobytes())
        for name, array in weights.items()
    }


def write_huggingface(folder: Path, weights: Weights, **settings: Any) -> Path:
    """A Hugging Face folder with one float32 safetensors file and no tokenizer. ``None`` removes a setting."""
    folder.mkdir(exist_ok=True)
    config = HF_CONFIG | {"vocab_size": weights["embed_tokens.weight"].shape[0]} | settings
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", stored_f32(weights))
    return folder

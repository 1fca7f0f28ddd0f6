"""The input of all peers: the same bfloat16 weights in the format of each, and the same prompt token ids.

The GGUF model is dequantised and rounded to bfloat16 once; llama.cpp gets it as a bf16 GGUF file, vLLM and
transformers as a Hugging Face folder. Prompts go through flexspec's tokenizer and chat template, so that no peer
counts its own tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf

from flexspec.compiler.artifact.tensor_file import encode_tensors
from flexspec.compiler.frontends.open_model import LoadedModel, open_model
from flexspec.runtime.text.chat import ChatRenderer
from flexspec.runtime.text.tokenizer import Tokenizer
from flexspec.weight_formats.bf16 import to_bf16_bits


def write_bf16_gguf(source: Path, out: Path) -> Path:
    """Copy ``source`` with every matrix as BF16 and every vector as F32; ``out`` is left alone if it is newer."""
    if out.exists() and out.stat().st_mtime > source.stat().st_mtime:
        return out
    reader = gguf.GGUFReader(source)
    partial = out.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in {"general.architecture", "general.file_type"}:
            continue
        item_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=item_type)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = gguf.GGMLQuantizationType.BF16 if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(out)
    return out


def write_huggingface_folder(model: LoadedModel, source: Path, out: Path) -> Path:
    """Write config.json, model.safetensors (bfloat16) and tokenizer.json, unless they are newer than ``source``."""
    weights_path = out / "model.safetensors"
    if weights_path.exists() and weights_path.stat().st_mtime > source.stat().st_mtime:
        return out
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name in model.weights.names():
        hf_name = name if name == "lm_head.weight" else f"model.{name}"
        tensors[hf_name] = to_bf16_bits(model.weights.get(name))
    (out / "config.json").write_text(json.dumps(huggingface_config(model), indent=1))
    (out / "tokenizer.json").write_bytes(model.tokenizer_json or b"")
    with weights_path.open("wb") as file:
        for chunk in encode_tensors(tensors, bf16=set(tensors)):
            file.write(chunk)
    return out


def huggingface_config(model: LoadedModel) -> dict[str, Any]:
    """config.json of a Llama model without RoPE scaling; others are refused with ValueError."""
    config = model.config
    if config.family != "llama" or config.rope.kind != "default":
        raise ValueError(f"the peers are set up for plain Llama models, not {config.family} with {config.rope.kind}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.qkv_bias,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
    }


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Spec-Bench's form: one JSON object a line with question_id, category and turns; the first turn is used."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def encode_prompts(prompts: list[dict[str, Any]], model: LoadedModel, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The prompts as token ids of one user message each, with the generation prompt."""
    chat = ChatRenderer(model.chat_template or "", model.special_tokens)
    encoded = []
    for prompt in prompts:
        text = chat.render([{"role": "user", "content": prompt["turns"][0]}])
        ids = tokenizer.encode(text, add_special=True)
        encoded.append({"question_id": prompt["question_id"], "category": prompt["category"], "ids": ids})
    return encoded


def prepare(model_path: Path, prompts_path: Path, folder: Path, count: int | None) -> tuple[dict[str, Path], Tokenizer]:
    """Write everything the peers need into ``folder``; returns the paths by format name, and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model = open_model(model_path)
    tokenizer = Tokenizer(model.tokenizer_json or b"", eos_ids=model.config.eos_ids, bos_id=model.config.bos_id)
    prompts = encode_prompts(read_prompts(prompts_path)[:count], model, tokenizer)
    ids_path = folder / "prompts.json"
    ids_path.write_text(json.dumps({"eos_ids": list(model.config.eos_ids), "prompts": prompts}))
    print(f"{len(prompts)} prompts, {sum(len(p['ids']) for p in prompts)} tokens", file=sys.stderr)
    paths = {
        "gguf": write_bf16_gguf(model_path, folder / "model-bf16.gguf"),
        "huggingface": write_huggingface_folder(model, model_path, folder / "huggingface"),
        "prompts": ids_path,
    }
    return paths, tokenizer

"""GGUF checkpoints (llama.cpp's format): configuration, canonical names, and dequantised weights, one at a time.

Architectures llama (with SmolLM2, Mistral), qwen2 and qwen3. llama.cpp's converter reorders the q and k rows of the
llama architecture for interleaved rotary pairs; they are put back to half-split order here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from flexspec.compiler.frontends.files import hash_files, read_bytes
from flexspec.compiler.frontends.gguf_header import GgufHeader, GgufTensor, read_header
from flexspec.compiler.frontends.loaded_model import LoadedModel
from flexspec.compiler.frontends.rope_settings import rope_from_gguf
from flexspec.compiler.frontends.settings import Settings, check_sliding_window
from flexspec.compiler.frontends.tokenizer_gguf import build_tokenizer_json, special_token_texts
from flexspec.compiler.frontends.weights import check_layer_count, finite
from flexspec.errors import ModelConfigError, WeightError
from flexspec.models.config import ModelConfig, check_config
from flexspec.weight_formats.bf16 import widen_bf16

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_OUTSIDE_LAYERS = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
# End-of-turn tokens that some converters leave out of the metadata; llama.cpp stops at them too.
_END_TEXTS = ("<|eot_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>")
_CONTROL = 3  # token type


class GgufWeights:
    """WeightSource over one GGUF file. A tensor without a canonical name keeps its own: check_weights reports it."""

    def __init__(self, header: GgufHeader, heads: int, kv_heads: int, interleaved: bool) -> None:
        self._path = header.path
        self._tensors: dict[str, GgufTensor] = {}
        for tensor in header.tensors.values():
            name = canonical_name(tensor.name)
            if name in self._tensors:
                found = f"{header.path} holds {name!r} twice, as {self._tensors[name].name!r} and {tensor.name!r}"
                raise WeightError(found, "each parameter once", "convert the model again")
            if tensor.name != _ROPE_FACTORS:
                self._tensors[name] = tensor
        self._interleaved_heads = {"q_proj": heads, "k_proj": kv_heads} if interleaved else {}

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def get(self, name: str) -> NDArray[np.float32]:
        """The tensor in float32, rows in half-split order. Raises WeightError or ModelFileError."""
        array = finite(read_tensor(self._path, self._tensor(name)), name, self._path)
        parts = name.split(".")
        heads = self._interleaved_heads.get(parts[-2]) if len(parts) > 1 else None
        if heads is None:
            return array
        if array.shape[0] % (2 * heads):
            found = f"tensor {name!r} of {self._path} has {array.shape[0]} rows"
            raise WeightError(found, f"{heads} heads of even width", "the file is damaged: download it again")
        return half_split(array, heads)

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise WeightError(
                f"{self._path} has no tensor for {name!r}", "every parameter of the model", "check the file"
            )
        return self._tensors[name]


def open_gguf(path: Path) -> LoadedModel:
    """Open one GGUF file. Raises ModelFileError, ModelConfigError, WeightError or TokenizerError."""
    header = read_header(path)
    metadata = Settings(header.metadata, path)
    config = read_config(header)
    arch = metadata.string("general.architecture")
    weights = GgufWeights(header, config.heads, config.kv_heads, interleaved=arch == "llama")
    check_layer_count(weights, config.layers, path)
    template = metadata.string("tokenizer.chat_template", "")
    return LoadedModel(
        config=config,
        weights=weights,
        tokenizer_json=build_tokenizer_json(header.metadata, path, config.vocab_size),
        chat_template=template or None,
        source_hash=hash_files([path]),
        name=metadata.string("general.name", path.stem) or path.stem,
        format="gguf",
        architecture=arch,
        special_tokens=special_token_texts(header.metadata, path),
    )


def read_config(header: GgufHeader) -> ModelConfig:
    """The configuration in a GGUF file's metadata and tensor table. Raises ModelConfigError or WeightError."""
    path, meta = header.path, Settings(header.metadata, header.path)
    arch = meta.string("general.architecture")
    if arch not in ARCHITECTURES:
        raise meta.error(
            "general.architecture", f"one of {', '.join(ARCHITECTURES)}", "use a model of one of these families"
        )
    if meta.integer(f"{arch}.expert_count", 0, least=0):
        raise meta.error(f"{arch}.expert_count", "a dense model", "mixtures of experts are not supported")
    heads = _uniform(meta, header, f"{arch}.attention.head_count", None)
    hidden = meta.integer(f"{arch}.embedding_length")
    head_dim = meta.integer(f"{arch}.attention.key_length", max(1, hidden // heads))
    if meta.integer(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise meta.error(f"{arch}.attention.value_length", f"the key length ({head_dim})")
    positions = meta.integer(f"{arch}.context_length")
    check_sliding_window(meta.integer(f"{arch}.attention.sliding_window", 0, least=0), positions)
    tensors = header.tensors
    if "token_embd.weight" not in tensors:
        raise WeightError(f"{path} has no tensor token_embd.weight", "a token embedding", "download the file again")
    vocab = tensors["token_embd.weight"].shape[0]
    if meta.integer(f"{arch}.vocab_size", vocab) != vocab:
        raise meta.error(f"{arch}.vocab_size", f"the rows of token_embd.weight ({vocab})")
    bos = meta.token_ids("tokenizer.ggml.bos_token_id")
    config = ModelConfig(
        family=arch,
        vocab_size=vocab,
        hidden_size=hidden,
        layers=meta.integer(f"{arch}.block_count"),
        heads=heads,
        kv_heads=_uniform(meta, header, f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn_size=_uniform(meta, header, f"{arch}.feed_forward_length", None),
        norm_eps=meta.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        max_positions=positions,
        rope=rope_from_gguf(meta, arch, head_dim, _rope_factors(header), path),
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        bos_id=bos[0] if bos else None,
        eos_ids=_end_ids(header),
    )
    check_config(config, str(path))
    return config


def _uniform(meta: Settings, header: GgufHeader, key: str, default: int | None) -> int:
    """A number that may be stored per layer; all layers must agree."""
    value = header.metadata.get(key)
    if not isinstance(value, np.ndarray):
        return meta.integer(key, default)
    if value.size == 0 or value.dtype.kind not in "iu" or (value != value[0]).any():
        raise ModelConfigError(
            f"{header.path} has a {key} that differs by layer", "the same for all layers", "use another model"
        )
    return Settings({key: int(value[0])}, header.path).integer(key)


def _end_ids(header: GgufHeader) -> tuple[int, ...]:
    """Ids that end a reply, the tokenizer's own end of sequence first."""
    meta = Settings(header.metadata, header.path)
    ids = [
        token
        for key in ("eos_token_id", "eot_token_id", "eom_token_id")
        for token in meta.token_ids(f"tokenizer.ggml.{key}")
    ]
    tokens, kinds = header.metadata.get("tokenizer.ggml.tokens"), header.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray):
        control = {tokens[i]: int(i) for i in np.flatnonzero(kinds[: len(tokens)] == _CONTROL)}
        ids += [control[text] for text in _END_TEXTS if text in control]
    return tuple(dict.fromkeys(ids))


def _rope_factors(header: GgufHeader) -> NDArray[np.float32] | None:
    tensor = header.tensors.get(_ROPE_FACTORS)
    return None if tensor is None else read_tensor(header.path, tensor)


def canonical_name(name: str) -> str:
    """llama.cpp's tensor name in the project's terms; an unknown name is returned unchanged."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return name
    if stem in _OUTSIDE_LAYERS:
        return f"{_OUTSIDE_LAYERS[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _IN_LAYER:
        return f"layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{kind}"
    return name


def half_split(array: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows [H*D] from interleaved pairs (llama.cpp) to two halves per head (Hugging Face)."""
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def read_tensor(path: Path, tensor: GgufTensor) -> NDArray[np.float32]:
    """Read and dequantise one tensor. Raises WeightError for an unsupported type."""
    kind = tensor.type.name
    if kind not in _TYPES:
        found = f"tensor {tensor.name!r} of {path} is of type {kind}"
        raise WeightError(found, f"one of {', '.join(_TYPES)}", "use the model in another quantisation")
    raw = read_bytes(path, tensor.offset, tensor.size_bytes)
    if tensor.type is GGMLQuantizationType.BF16:
        return widen_bf16(raw.view("<u2")).reshape(tensor.shape)
    if tensor.type is GGMLQuantizationType.F32:
        return raw.view("<f4").astype(np.float32, copy=False).reshape(tensor.shape)
    rows = raw.reshape(*tensor.shape[:-1], -1)
    with np.errstate(all="ignore"):  # damaged scales may overflow; the caller checks that the result is finite
        values: Any = dequantize(rows.view(np.float16) if kind == "F16" else rows, tensor.type)
    return np.ascontiguousarray(values, np.float32).reshape(tensor.shape)

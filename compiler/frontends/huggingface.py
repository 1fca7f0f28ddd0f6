"""Hugging Face folders: config.json, safetensors, tokenizer.json and chat template, and the project's own SSM folders.

Nothing in the folder is executed and no pickle is read. Defaults for absent keys are those of transformers' classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flexspec.compiler.frontends.expert_weights import rename_weights
from flexspec.compiler.frontends.files import hash_files, parse_json, read_json_object, read_text
from flexspec.compiler.frontends.loaded_model import FusedState, LoadedModel
from flexspec.compiler.frontends.rope_settings import rope_from_huggingface
from flexspec.compiler.frontends.safetensors_file import (
    SafetensorsWeights,
    find_weight_files,
    open_weights,
    read_header,
)
from flexspec.compiler.frontends.settings import Settings, check_sliding_window
from flexspec.compiler.frontends.token_rows import token_ids
from flexspec.compiler.frontends.weights import check_layer_count
from flexspec.errors import ModelFileError, TokenizerError, WeightError
from flexspec.models.config import Checkpoint, ModelConfig, WeightSource, check_config
from flexspec.models.registry import architectures

FUSED_STATE = "FusedStateSSM"


_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def open_huggingface(folder: Path) -> LoadedModel:
    """Open a Hugging Face folder. Raises ModelFileError, ModelConfigError, WeightError or TokenizerError."""
    config_path = folder / "config.json"
    if not config_path.exists():
        ggufs = sorted(folder.glob("*.gguf"))
        fix = f"pass the file {ggufs[0]}" if ggufs else "pass the folder that holds the model's files"
        raise ModelFileError(f"{folder} has no config.json", "a Hugging Face folder", fix)
    settings = Settings(read_json_object(config_path, "a Hugging Face config.json"), config_path)
    config, architecture = read_config(settings, config_path)
    generation = _optional_object(folder / "generation_config.json")
    ends = Settings(generation, folder / "generation_config.json").token_ids("eos_token_id")
    config = replace(config, eos_ids=tuple(dict.fromkeys((*ends, *config.eos_ids))))
    tokenizer_config = _optional_object(folder / "tokenizer_config.json")
    tokenizer_json = _read_tokenizer(folder)
    special_tokens = _special_texts(_optional_object(folder / "special_tokens_map.json"))
    special_tokens |= _special_texts(tokenizer_config)
    config = _with_named_tokens(config, special_tokens, tokenizer_json)
    check_config(config, str(config_path))
    rules = architectures()[architecture][1]
    weights: WeightSource = open_weights(folder)
    if rules.stored_names:
        weights = rename_weights(weights, rules.stored_names, config.experts, folder)
    check_layer_count(weights, config.layers, folder)
    files = [config_path, *find_weight_files(folder), *(folder / name for name in _TOKENIZER_FILES)]
    fused: FusedState | None = None
    if isinstance(weights, SafetensorsWeights) and architecture == FUSED_STATE:
        weights, fused = _read_fused_state(settings, config, weights, folder)
        files.append(folder / "vocab_map.safetensors")
    return LoadedModel(
        config=config,
        weights=weights,
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, tokenizer_config),
        source_hash=hash_files(path for path in files if path.exists()),
        name=folder.resolve().name,
        format="huggingface",
        architecture=architecture,
        special_tokens=special_tokens,
        fused=fused,
    )


def read_config(settings: Settings, path: Path) -> tuple[ModelConfig, str]:
    """The configuration and the architecture's name from a config.json. Raises ModelConfigError."""
    names = settings.strings("architectures")
    table = architectures()
    known = [name for name in names if name in table]
    if not known:
        fix = "use a model of one of these families"
        raise settings.error("architectures", f"one of {', '.join(sorted(table))}", fix)
    family, rules = table[known[0]]
    settings = settings.with_keys(rules.keys)
    if "quantization_config" in settings:
        raise settings.error("quantization_config", "weights in plain floating point", "use the unquantised model")
    if settings.string("hidden_act", rules.activations[0]) not in rules.activations:
        fix = f"the {family} graph computes no other activation"
        raise settings.error("hidden_act", " or ".join(rules.activations), fix)
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    positions = settings.integer("max_position_embeddings", rules.positions)
    layers = settings.integer("num_hidden_layers")
    _check_window(settings, rules, layers, positions)
    if "head_dim" not in settings and rules.head_dim is None and hidden % heads:
        raise settings.error("num_attention_heads", f"a divisor of hidden_size ({hidden})")
    attention_bias = settings.flag("attention_bias", False)
    bos = settings.token_ids("bos_token_id")
    config = ModelConfig(
        family=family,
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=settings.integer("num_key_value_heads", rules.kv_heads or heads),
        head_dim=settings.integer("head_dim", rules.head_dim or max(1, hidden // heads)),
        ffn_size=settings.integer("intermediate_size"),
        norm_eps=settings.number("rms_norm_eps", rules.norm_eps),
        max_positions=positions,
        rope=rope_from_huggingface(settings, positions, path, rules.rope_theta),
        tied_embeddings=settings.flag("tie_word_embeddings", False),
        qkv_bias=rules.qkv_bias or attention_bias,
        output_bias=attention_bias and not rules.qkv_bias,
        mlp_bias=settings.flag("mlp_bias", False),
        qk_norm=rules.qk_norm,
        bos_id=bos[0] if bos else None,
        eos_ids=settings.token_ids("eos_token_id"),
    )
    config = config if rules.read is None else rules.read(settings, config)
    check_config(config, str(path))
    return config, known[0]


def _check_window(settings: Settings, rules: Checkpoint, layers: int, positions: int) -> None:
    """Refuse a sliding window that the model really uses; Mistral's class assumes one if config.json has none."""
    window = 0 if settings.is_null("sliding_window") else settings.integer("sliding_window", rules.window or 0, least=0)
    types = settings.strings("layer_types")
    if types and "sliding_attention" not in types:
        return
    if rules.window_is_optional:
        uses = settings.flag("use_sliding_window", False)
        if not uses or (not types and settings.integer("max_window_layers", 28, least=0) >= layers):
            return
    elif rules.window is None and not types:
        return
    check_sliding_window(window, positions)


def fused_state(settings: Settings, config: ModelConfig) -> FusedState:
    """What a ``FUSED_STATE`` SSM's config.json has besides the model's configuration. Raises ModelConfigError."""
    return FusedState(settings.token_ids("tap_layers"), settings.integer("reduced_vocab_size", config.vocab_size))


def _read_fused_state(
    settings: Settings, config: ModelConfig, weights: SafetensorsWeights, folder: Path
) -> tuple[SafetensorsWeights, FusedState]:
    """A ``FUSED_STATE`` SSM's extra keys, and its vocabulary map, stored in a separate file or among the weights."""
    fused = fused_state(settings, config)
    reduced = fused.reduced_vocab_size
    map_file = folder / "vocab_map.safetensors"
    source = SafetensorsWeights(read_header(map_file).values(), map_file) if map_file.exists() else weights
    if "keep_ids" in source.names():
        keep = source.integers("keep_ids")
        valid = keep.shape == (reduced,) and len(np.unique(keep)) == reduced
        if not valid or int(keep.min()) < 0 or int(keep.max()) >= config.vocab_size:
            found = f"keep_ids of {folder} has shape {list(keep.shape)} or repeated or unknown ids"
            raise WeightError(found, f"{reduced} different ids below {config.vocab_size}", "make the SSM again")
        fused = replace(fused, keep_ids=keep.astype(np.int32))
        weights = weights.without("keep_ids")
    elif reduced != config.vocab_size:
        raise WeightError(f"{folder} has no keep_ids", f"a map of {reduced} ids", "make the SSM again")
    return weights, fused


def _optional_object(path: Path) -> Mapping[str, Any]:
    return read_json_object(path, "a JSON object") if path.exists() else {}


def _read_tokenizer(folder: Path) -> bytes | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        if (folder / "tokenizer.model").exists():
            fix = "save the tokenizer with `transformers` (save_pretrained writes tokenizer.json)"
            raise TokenizerError(f"{folder} has only a SentencePiece tokenizer.model", "tokenizer.json", fix)
        return None
    data = read_text(path, "a tokenizer.json").encode()
    if not isinstance(parse_json(data, path, "a tokenizer.json"), dict):
        raise TokenizerError(f"{path} is not a JSON object", "a tokenizer.json", "download the file again")
    return data


def _special_texts(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens, each stored as text or as an object with ``content``."""
    texts = {}
    for name in _SPECIAL_NAMES:
        value = tokenizer_config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    return texts


def _with_named_tokens(config: ModelConfig, texts: Mapping[str, str], tokenizer_json: bytes | None) -> ModelConfig:
    """The first and the end token by their texts, where no file has their ids. Raises TokenizerError."""
    wanted = {"bos_token"} if config.bos_id is None else set()
    wanted |= set() if config.eos_ids else {"eos_token"}
    if tokenizer_json is None or not wanted & texts.keys():
        return config
    ids = token_ids(tokenizer_json)
    found = {name: ids[texts[name]] for name in wanted & texts.keys() if texts[name] in ids}
    if "bos_token" in found:
        config = replace(config, bos_id=found["bos_token"])
    return replace(config, eos_ids=(found["eos_token"],)) if "eos_token" in found else config


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja takes precedence over tokenizer_config.json; of several named templates, take ``default``."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path, "a chat template")
    value = tokenizer_config.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        found = f"{folder / 'tokenizer_config.json'} has a chat_template of type {type(value).__name__}"
        raise TokenizerError(found, "a text, or a list of named texts", "download the file again")
    return value or None

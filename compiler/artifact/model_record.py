"""``model.json`` of an artifact: what it holds, model by model. Owns the record, its JSON form and its checks.

Sizes that kernels depend on are not trusted to this file: libraries carry their own (kernels/cpu/facts.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from flexspec.compiler.artifact import layout
from flexspec.errors import ArtifactError

LLM = "llm"


@dataclass(frozen=True, slots=True)
class PartRecord:
    """One model: "llm", "ssm", "ssm2"... ``weights``: (file, tensor) of each entry of the program's weight table.

    ``keep_ids[i]`` is the token of output i; None when outputs are the vocabulary.
    """

    name: str
    family: str
    graph_hash: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    outputs: int
    max_positions: int
    feature_columns: int
    reads_features: int
    parameters: int
    parameter_bytes: int
    keep_ids: tuple[int, ...] | None
    weights: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class GpuRecord:
    """What executors on a GPU need beside kernels; only in artifacts that were compiled for one.

    ``weights[model][name]`` is (file, tensor) of a weight as the model's graph names it. ``max_tree_tokens``: rows of a
    token tree that the kernels take, the root counted.
    """

    max_tree_tokens: int
    weights: Mapping[str, Mapping[str, tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The artifact's models, the LLM first, and what its tokenizer and server need to know."""

    name: str
    source_hash: str
    dtype: str  # of activations and KV caches
    weight_format: str  # in which weight matrices are stored
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    models: tuple[PartRecord, ...]
    gpu: GpuRecord | None = None

    def to_json(self) -> dict[str, Any]:
        table = asdict(self)
        if self.gpu is None:
            del table["gpu"]
        return table


def record_from_json(body: object) -> ModelRecord:
    """Raises ArtifactError when a field is missing, of the wrong kind or contradicts another."""
    table = _table(body, "the file")
    record = ModelRecord(
        name=_text(table, "name"),
        source_hash=_text(table, "source_hash"),
        dtype=_text(table, "dtype"),
        weight_format=_text(table, "weight_format"),
        bos_id=None if table.get("bos_id") is None else _count(table, "bos_id"),
        eos_ids=_counts(table, "eos_ids"),
        special_tokens={name: _text(table["special_tokens"], name) for name in _table(table.get("special_tokens"), "")},
        models=tuple(_part(part) for part in _list(table, "models")),
        gpu=None if table.get("gpu") is None else _gpu(table["gpu"]),
    )
    names = [part.name for part in record.models]
    if names[:1] != [LLM] or len(set(names)) != len(names):
        raise _wrong(f"models {names}", f"{LLM} first, then SSMs, each once")
    if record.gpu is not None and sorted(record.gpu.weights) != sorted(names):
        raise _wrong(f"GPU weights of {sorted(record.gpu.weights)}", "those of every model")
    return record


def _part(body: object) -> PartRecord:
    table = _table(body, "models")
    numbers = {field.name: _count(table, field.name) for field in fields(PartRecord) if field.type == "int"}
    texts = {name: _text(table, name) for name in ("name", "family", "graph_hash")}
    keep_ids = None if table.get("keep_ids") is None else _counts(table, "keep_ids")
    weights = tuple(_place(place) for place in _list(table, "weights"))
    if keep_ids is not None and any(token >= numbers["vocab_size"] for token in keep_ids):
        raise _wrong("keep_ids", f"tokens below {numbers['vocab_size']}")
    if numbers["outputs"] != (numbers["vocab_size"] if keep_ids is None else len(keep_ids)):
        raise _wrong(f"{numbers['outputs']} outputs", "one for each token of the vocabulary or of keep_ids")
    return PartRecord(**texts, **numbers, keep_ids=keep_ids, weights=weights)  # type: ignore[arg-type]


def _gpu(body: object) -> GpuRecord:
    table = _table(body, "gpu")
    models = {model: _table(places, "gpu.weights") for model, places in _table(table.get("weights"), "gpu").items()}
    return GpuRecord(
        max_tree_tokens=_count(table, "max_tree_tokens"),
        weights={model: {name: _place(place) for name, place in places.items()} for model, places in models.items()},
    )


def _place(value: object) -> tuple[str, str]:
    if not isinstance(value, list) or len(value) != 2:
        raise _wrong("weights", "[file, tensor] of each")
    return str(value[0]), str(value[1])


def _table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(f"{where or 'special_tokens'} with a {type(value).__name__}", "an object")
    return value


def _list(table: dict[str, Any], name: str) -> list[Any]:
    value = table.get(name)
    if not isinstance(value, list):
        raise _wrong(f"{name}={value!r:.60}", "a list")
    return value


def _text(table: dict[str, Any], name: str) -> str:
    value = table.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{name}={value!r:.60}", "a text")
    return value


def _count(table: dict[str, Any], name: str) -> int:
    value = table.get(name)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise _wrong(f"{name}={value!r:.60}", "a whole number, not negative")
    return value


def _counts(table: dict[str, Any], name: str) -> tuple[int, ...]:
    values = _list(table, name)
    return tuple(_count({name: value}, name) for value in values)


def _wrong(found: str, expected: str) -> ArtifactError:
    return ArtifactError(f"{layout.MODELS} holds {found}", expected, "compile the model again")

"""``model.json`` of an artifact: what it holds, model by model. Owns the record, its JSON form and its checks.

Sizes that kernels depend on are not trusted to this file: libraries carry their own (kernels/cpu/facts.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from flexspec.checked_table import MAX_COUNT, Table, show
from flexspec.compiler.artifact import layout
from flexspec.compiler.artifact.manifest import damaged

LLM = "llm"
_PLACES = "pairs [file, tensor], one for each weight"


@dataclass(frozen=True, slots=True)
class PartRecord:
    """What the artifact says of one model."""

    name: str  # "llm", "ssm", "ssm2"...
    family: str
    graph_hash: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    outputs: int  # columns of the logits
    max_positions: int
    feature_columns: int
    reads_features: int
    parameters: int
    parameter_bytes: int
    keep_ids: tuple[int, ...] | None  # the token of each output; None: the outputs are the vocabulary
    weights: tuple[tuple[str, str], ...]  # (file, tensor) of each entry of the program's weight table


@dataclass(frozen=True, slots=True)
class GpuRecord:
    """What executors on a GPU need besides kernels; only in artifacts compiled for one."""

    max_tree_tokens: int  # the largest token tree that the kernels take, including its root
    weights: Mapping[str, Mapping[str, tuple[str, str]]]  # model -> its graph's name of a weight -> (file, tensor)


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The artifact's models, the LLM first, and what its tokenizer and server need to know."""

    name: str
    source_hash: str
    dtype: str  # of activations and KV caches
    weight_format: str  # of the weight matrices
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
    """Raises ArtifactError if a field is missing, has the wrong type or contradicts another."""
    table = Table.of(body, layout.MODELS, damaged)
    specials = table.table("special_tokens")
    record = ModelRecord(
        name=table.text("name"),
        source_hash=table.text("source_hash"),
        dtype=table.text("dtype"),
        weight_format=table.text("weight_format"),
        bos_id=None if table.is_null("bos_id") else table.count("bos_id", MAX_COUNT, 0),
        eos_ids=table.counts("eos_ids", MAX_COUNT),
        special_tokens={name: specials.text(name, blank=True) for name in specials.names()},
        models=tuple(_part(part) for part in table.array("models")),
        gpu=_gpu(table.table("gpu")) if table.has("gpu") else None,
    )
    table.done()
    names = [part.name for part in record.models]
    if names[:1] != [LLM] or len(set(names)) != len(names):
        raise table.error("models", str(names), f"{LLM} first, then SSMs, each once")
    if record.gpu is not None and sorted(record.gpu.weights) != sorted(names):
        raise table.error("gpu.weights", f"weights of {sorted(record.gpu.weights)}", f"of {sorted(names)}")
    return record


def _part(table: Table) -> PartRecord:
    integers = [field.name for field in fields(PartRecord) if field.type == "int"]
    numbers = {name: table.count(name, MAX_COUNT, 0) for name in integers}
    texts = {name: table.text(name) for name in ("name", "family", "graph_hash")}
    keep_ids = None if table.is_null("keep_ids") else table.counts("keep_ids", numbers["vocab_size"] - 1)
    weights = tuple(_place(table, "weights", row) for row in table.rows("weights", _PLACES))
    table.done()
    if numbers["outputs"] != (numbers["vocab_size"] if keep_ids is None else len(keep_ids)):
        raise table.error("outputs", f"{numbers['outputs']}", "one per token of the vocabulary or of keep_ids")
    return PartRecord(**texts, **numbers, keep_ids=keep_ids, weights=weights)  # type: ignore[arg-type]


def _gpu(table: Table) -> GpuRecord:
    models = table.tables("weights")
    record = GpuRecord(
        max_tree_tokens=table.count("max_tree_tokens", MAX_COUNT, 0),
        weights={
            model: {name: _place(places, name, places.texts(name)) for name in places.names()}
            for model, places in models.items()
        },
    )
    table.done()
    return record


def _place(table: Table, key: str, value: Sequence[Any]) -> tuple[str, str]:
    if len(value) != 2 or not all(isinstance(text, str) for text in value):
        raise table.error(key, show(value), "a pair [file, tensor]")
    return value[0], value[1]

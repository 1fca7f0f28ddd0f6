"""The artifact's record of its models, from its parts. Sizes are those of the graphs, whatever runs them."""

from __future__ import annotations

from collections.abc import Sequence

from flexspec.compiler.artifact.model_record import ModelRecord, PartRecord
from flexspec.kernels.package.devices.registry import SharedRecords
from flexspec.kernels.package.parts import ModelPart
from flexspec.kernels.package.weight_store import Place
from flexspec.step_sizes import step_sizes
from flexspec.types import DType, Role, WeightFormat
from flexspec.weight_formats.registry import plain_format


def model_record(
    parts: Sequence[ModelPart], dtype: DType, weights: WeightFormat | None, devices: SharedRecords
) -> ModelRecord:
    """``devices``: what they have to say of the models."""
    llm = parts[0].model
    return ModelRecord(
        name=llm.name,
        source_hash=llm.source_hash,
        dtype=dtype.value,
        weight_format=(weights or plain_format(dtype)).name,
        bos_id=llm.config.bos_id,
        eos_ids=tuple(llm.config.eos_ids),
        special_tokens=dict(llm.special_tokens),
        models=tuple(_part_record(part, devices.weight_tables.get(part.name, ())) for part in parts),
        gpu=devices.gpu,
    )


def _part_record(part: ModelPart, packed: tuple[Place, ...]) -> PartRecord:
    config, sizes = part.model.config, step_sizes(part.lowered)
    keep = part.model.fused.keep_ids if part.model.fused else None
    return PartRecord(
        name=part.name,
        family=config.family,
        graph_hash=part.graph.hash(),
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        outputs=sizes.outputs,
        max_positions=min(config.max_positions, sizes.max_positions),  # a learned table may be shorter
        feature_columns=sizes.feature_columns,
        reads_features=sizes.reads_features,
        parameters=sum(value.type.elements({}) for value in part.graph.inputs_of(Role.WEIGHT)),
        parameter_bytes=sum(value.type.bytes({}) for value in part.graph.inputs_of(Role.WEIGHT)),
        keep_ids=None if keep is None else tuple(int(token) for token in keep),
        weights=packed,
    )

"""The models of an artifact on their way into it: checkpoint, graph, lowered graph, and where each weight comes from.

Owns the weights that an SSM that reads hidden states and its LLM share. What is stored of a part, device by device, is
in ``cpu.py`` and ``gpu.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexspec.compiler.artifact.model_record import LLM
from flexspec.compiler.frontends.loaded_model import FusedState, LoadedModel
from flexspec.compiler.frontends.open_model import check_weights
from flexspec.compiler.passes.pipeline import LLM_PASSES, SSM_PASSES, run_passes
from flexspec.graph import Graph
from flexspec.kernels.cpu.pack import GetWeight
from flexspec.models.fused_state import graft_fuse_head
from flexspec.models.registry import build_model, expected_weights
from flexspec.retype import store_weights
from flexspec.types import DType, WeightFormat

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_FUSE = "fuse."  # names of the fuse head's weights in the LLM's graph


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One model of an artifact."""

    name: str  # llm, ssm, ssm2...
    model: LoadedModel
    graph: Graph  # as built
    lowered: Graph  # after the passes
    get: GetWeight  # a weight of the graph, in float32


def build_parts(
    llm: LoadedModel,
    llm_path: Path,
    ssms: Sequence[LoadedModel],
    ssm_paths: Sequence[Path],
    dtype: DType,
    weights: WeightFormat | None,
    dump_ir: Path | None,
) -> list[ModelPart]:
    """The LLM, then the SSMs, their matrices stored as ``weights`` says (None: as numbers of ``dtype``).

    Raises PassError, ModelConfigError, WeightError for checkpoints without a weight, and GraphError for matrices that
    the format cannot store.
    """
    fused = next((ssm for ssm in ssms if ssm.fused is not None), None)
    plain = build_model(llm.config, dtype)
    check_weights(llm.weights, expected_weights(plain), llm_path)
    graph = plain
    get: GetWeight = llm.weights.get
    if fused is not None and fused.fused is not None:
        graph = graft_fuse_head(build_model(llm.config, dtype, taps=fused.fused.tap_layers))
        get = _with_fuse_head(llm.weights.get, fused.weights.get)
    parts = [_part(LLM, llm, graph, get, weights, dump_ir)]
    for number, (ssm, path) in enumerate(zip(ssms, ssm_paths, strict=True), 1):
        name = "ssm" if number == 1 else f"ssm{number}"
        ssm_graph = build_model(ssm.config, dtype, **ssm.build_options, name=name)
        wanted = expected_weights(ssm_graph)
        get = ssm.weights.get
        if ssm.fused is not None:  # embedding and head rows are the LLM's own, the fuse head lives on the LLM's graph
            wanted = {weight: shape for weight, shape in wanted.items() if weight not in (_EMBEDDING, _HEAD)}
            wanted |= {weight: shape for weight, shape in expected_weights(graph).items() if weight.startswith(_FUSE)}
            get = _with_lent_rows(ssm.weights.get, llm, ssm.fused)
        check_weights(ssm.weights, wanted, path)
        parts.append(_part(name, ssm, ssm_graph, get, weights, dump_ir))
    return parts


def _part(
    name: str, model: LoadedModel, graph: Graph, get: GetWeight, weights: WeightFormat | None, dump_ir: Path | None
) -> ModelPart:
    graph = graph if weights is None else store_weights(graph, weights)
    dump = dump_ir / name if dump_ir else None
    return ModelPart(name, model, graph, run_passes(graph, LLM_PASSES if name == LLM else SSM_PASSES, dump), get)


def _with_fuse_head(of_llm: GetWeight, of_ssm: GetWeight) -> GetWeight:
    return lambda weight: (of_ssm if weight.startswith(_FUSE) else of_llm)(weight)


def _with_lent_rows(of_ssm: GetWeight, llm: LoadedModel, fused: FusedState) -> GetWeight:
    head = _EMBEDDING if llm.config.tied_embeddings else _HEAD

    def get(weight: str) -> NDArray[np.float32]:
        if weight == _EMBEDDING:
            return llm.weights.get(weight)
        if weight == _HEAD:
            rows = llm.weights.get(head)
            return rows if fused.keep_ids is None else rows[fused.keep_ids]
        return of_ssm(weight)

    return get

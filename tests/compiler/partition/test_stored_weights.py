"""Weights stored in blocks are cut over ranks between blocks: a rank stores what the whole weight would hold."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from step_models import random_weights, tiny_config

from flexspec.compiler.artifact.plan import Stage
from flexspec.compiler.partition.cut_ranks import partition
from flexspec.compiler.partition.rank_part import RankPart
from flexspec.errors import PartitionError
from flexspec.graph import Graph
from flexspec.models.registry import build_model
from flexspec.retype import store_weights
from flexspec.types import DType, Role, WeightFormat
from flexspec.weight_formats.registry import stored_values, weight_formats

BLOCK = 32
_STORED_BYTES = 4 + BLOCK


def _encode(values: NDArray[np.float32]) -> NDArray[np.generic]:
    """A float32 scale and 32 int8 a block."""
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127) + np.float32(1e-12)
    numbers = np.rint(blocks / scale).astype(np.int8)
    stored = np.concatenate([scale.astype("<f4").view(np.uint8), numbers.view(np.uint8)], -1)
    return stored.reshape(*values.shape[:-1], -1)


def _decode(stored: NDArray[np.generic]) -> NDArray[np.float32]:
    blocks = np.ascontiguousarray(stored.reshape(*stored.shape[:-1], -1, _STORED_BYTES))
    values: NDArray[np.float32] = blocks[..., :4].copy().view("<f4") * blocks[..., 4:].copy().view(np.int8)
    return values.reshape(*stored.shape[:-1], -1)


BLOCKS = WeightFormat("blocks32", "for tests", None, BLOCK, _STORED_BYTES, (DType.F32,), _encode, _decode)


def cut(degree: int, **changes: object) -> tuple[Graph, tuple[RankPart, ...]]:
    config = tiny_config(**{"layers": 1, "ffn_size": 160, **changes})
    graph = store_weights(build_model(config, DType.F32), BLOCKS)
    return graph, partition(graph, [Stage(0, 1, tuple(range(degree)))])


@pytest.mark.parametrize(
    ("degree", "sizes"),
    [
        (2, {"heads": 6, "kv_heads": 2, "head_dim": 64}),
        (3, {"heads": 6, "kv_heads": 3, "head_dim": 32, "hidden_size": 64}),
        (4, {"heads": 8, "kv_heads": 2, "head_dim": 16}),  # two heads make a block, four share a kv head
        (2, {"heads": 4, "kv_heads": 4, "head_dim": 16}),  # two kv heads make a block
        (2, {"family": "mixtral", "experts": 3, "experts_per_token": 2, "expert_ffn_size": 96, "head_dim": 32}),
    ],
)
def test_a_share_holds_what_the_whole_weight_would(degree: int, sizes: dict[str, object]) -> None:
    graph, parts = cut(degree, **sizes)
    weights, types = random_weights(graph), graph.types()
    cuts = 0
    for part in parts:
        local = part.graph.types()
        for piece in part.weights:
            whole, kind = weights[piece.source], local[piece.name]
            own = stored_values(piece.name, kind, piece.take(whole))
            np.testing.assert_array_equal(own, piece.take(stored_values(piece.source, types[piece.source], whole)))
            cuts += piece.dim is not None and piece.dim == len(kind.dims) - 1 and kind.format is not None
    assert cuts >= degree  # some were cut along their rows


def test_no_share_holds_parts_of_two_kv_heads() -> None:
    """Two heads make a block and three share a kv head: only all six are both."""
    with pytest.raises(PartitionError, match="has 1 parts to cut, for 2 ranks"):
        cut(2, heads=6, kv_heads=2, head_dim=16)


def test_ffn_columns_are_dealt_by_the_block() -> None:
    _, parts = cut(2, heads=6, kv_heads=2, head_dim=64)
    down = [part.graph.types()["layers.0.mlp.down_proj.weight"].dims[1] for part in parts]
    assert down == [96, 64]  # five blocks of 32
    plain = partition(build_model(tiny_config(layers=1, ffn_size=160), DType.F32), [Stage(0, 1, (0, 1))])
    assert [part.graph.types()["layers.0.mlp.down_proj.weight"].dims[1] for part in plain] == [80, 80]


def test_float16_may_be_cut_anywhere() -> None:
    plain = build_model(tiny_config(layers=1), DType.F32)
    stages = [Stage(0, 1, (0, 1))]
    shapes = [
        [[value.type.dims for value in part.graph.inputs_of(Role.WEIGHT)] for part in partition(graph, stages)]
        for graph in (plain, store_weights(plain, weight_formats()["f16"]))
    ]
    assert shapes[0] == shapes[1]

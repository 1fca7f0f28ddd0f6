"""Executors of the engine's tests, built once a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_models import CONFIG, SSM_CONFIG, Models
from step_models import on_cpu, random_weights, tiny_config, tiny_llm

from flexspec.models.fused_state import graft_fuse_head
from flexspec.models.registry import build_model
from flexspec.runtime.executors.step import Executor
from flexspec.types import DType


@pytest.fixture(scope="module", params=["bf16", "f32"])
def models(request: pytest.FixtureRequest) -> Iterator[Models]:
    dtype = DType(request.param)
    pair = Models(
        dtype,
        on_cpu(*tiny_llm(CONFIG, dtype), pages=96),
        on_cpu(*tiny_llm(SSM_CONFIG, dtype, seed=1), pages=96),
    )
    yield pair
    pair.llm.close()
    pair.ssm.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[Executor]:
    executor = on_cpu(*tiny_llm(CONFIG), pages=96)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def fused() -> Iterator[tuple[Executor, Executor]]:
    graph = graft_fuse_head(build_model(CONFIG, DType.F32, taps=(0, 1)))
    llm = on_cpu(graph, random_weights(graph), pages=96)
    graph = build_model(tiny_config(family="fused_state", layers=1), DType.F32, reduced_vocab_size=77)
    ssm = on_cpu(graph, random_weights(graph, seed=3), pages=96)
    yield llm, ssm
    llm.close()
    ssm.close()

"""The generated C++ source: a golden file, barriers where they must be, and what no template covers.

FLEXSPEC_UPDATE_GOLDEN=1 rewrites the golden file; read its diff before committing it.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from step_models import tiny_config

from flexspec.builder import GraphBuilder
from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.errors import CompileError
from flexspec.graph import Graph
from flexspec.kernels.cpu.emitters.registry import kernel_emitters
from flexspec.kernels.cpu.places import Arena
from flexspec.kernels.cpu.render import CpuProgram, render
from flexspec.models.fused_state import graft_fuse_head
from flexspec.models.registry import build_model
from flexspec.types import DType

GOLDEN = Path(__file__).parents[2] / "golden" / "llama_1_layer_bf16.cpp.txt"


def program(dtype: DType = DType.BF16, **changes: object) -> CpuProgram:
    return render(run_passes(build_model(tiny_config(**{"layers": 1, **changes}), dtype), LLM_PASSES))


def test_source_is_golden() -> None:
    source = program().source
    if os.environ.get("FLEXSPEC_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(source)
    assert source == GOLDEN.read_text(), f"{GOLDEN.name} differs; FLEXSPEC_UPDATE_GOLDEN=1 rewrites it"


def test_same_graph_same_source() -> None:
    assert program().source == program().source
    assert program(DType.F32).source != program().source


def test_facts_are_those_of_the_graph() -> None:
    facts = program().facts
    assert (facts.outputs, facts.id_rows, facts.max_positions) == (203, 203, 256)
    assert (facts.feature_columns, facts.reads_features) == (0, 0)
    numbers = facts.numbers()
    assert numbers[0] == len(numbers) - 1 and f"fs_facts[] = {{{', '.join(map(str, numbers))}}};" in program().source
    fused = graft_fuse_head(build_model(tiny_config(), DType.BF16, taps=(1,)))
    assert render(run_passes(fused, LLM_PASSES)).facts.feature_columns == 96
    ssm = build_model(tiny_config(family="fused_state", layers=1), DType.BF16, reduced_vocab_size=50)
    facts = render(run_passes(ssm, LLM_PASSES)).facts
    assert (facts.outputs, facts.id_rows, facts.reads_features) == (50, 203, 96)


def test_matrix_products_stand_between_barriers() -> None:
    """Each thread makes some columns of all rows: before and after, threads must meet."""
    body = [line.strip() for line in program(qkv_bias=True, qk_norm=True, layers=2).source.splitlines()]
    body = [
        line
        for line in body
        if line.startswith(("c.team.barrier", "gemm", "rms_norm", "rope", "attention", "select_rows"))
    ]
    kinds = [re.match(r"[a-z_.]+", line)[0] for line in body]  # type: ignore[index]
    for i, kind in enumerate(kinds):
        if kind.startswith("gemm"):
            assert kinds[i - 1] == "c.team.barrier" and (i + 1 == len(kinds) or kinds[i + 1] == "c.team.barrier")
    assert not any(a == b == "c.team.barrier" for a, b in zip(kinds, kinds[1:], strict=False))


def test_padded_buffers_are_never_shared() -> None:
    arena = Arena()
    padded = arena.take(192, padded=True)
    plain = arena.take(192)
    arena.give(padded)
    arena.give(plain)
    assert arena.take(192) == plain and arena.take(192) not in (padded, plain)


def mixed_shapes() -> Graph:
    """Two attention layers with different head counts."""
    b = GraphBuilder("mixed", DType.F32)
    step = b.step_inputs()
    x = b.embedding(step.ids_T, b.weight("embed_tokens.weight", (50, 32)))
    caches = []
    for i, heads in enumerate((2, 1)):
        q, k, v = (b.split_heads(b.linear(x, b.weight(f"l{i}.{n}", (heads * 16, 32))), heads) for n in ("q", "k", "v"))
        kv = [b.kv_cache(f"l{i}.{n}", heads, 16) for n in ("k_cache", "v_cache")]
        o, *new = b.attention(q, k, v, kv[0], kv[1], step, 0.25)
        x = b.add(x, b.linear(b.merge_heads(o), b.weight(f"l{i}.o", (32, heads * 16))))
        caches += new
    rows = b.select_rows(x, step.logit_rows_L)
    return b.finish(b.linear(rows, b.weight("head", (50, 32)), name="logits_LV"), *caches)


def test_what_no_template_covers_is_refused() -> None:
    with pytest.raises(CompileError, match="mixes attention shapes"):
        render(run_passes(mixed_shapes(), LLM_PASSES))
    with pytest.raises(CompileError, match="f16.*--dtype|weights and KV"):
        program(DType.F16)


def test_an_operator_with_an_unknown_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {key: emitter for key, emitter in kernel_emitters().items() if key != "rope"}
    monkeypatch.setattr("flexspec.kernels.cpu.render.kernel_emitters", lambda: others)
    with pytest.raises(CompileError, match="operator rope has the CPU kernel key 'rope'"):
        program()


def test_config_of_the_golden_file_has_what_matters() -> None:
    config = tiny_config(layers=1)
    assert replace(config, layers=2) == tiny_config() and config.tied_embeddings
    text = GOLDEN.read_text()
    for call in (
        "embedding<",
        "rms_norm<",
        "gemm<",
        "rope<",
        "attention<",
        "gemm_swiglu<",
        "select_rows<",
        "gemm_logits<",
    ):
        assert call in text

"""The whole path on a tiny model, the test to read first: graph, passes, plan, artifact, tokens.

An LLM of two layers and a speculative model (an SSM) become one artifact. What it writes with speculation is, token for
token, what it writes without; two ranks (processes that share every layer) write that text too.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
import tiny_models
from artifacts import VOCAB
from commands import serving

import flexspec
from flexspec import LLM, GraphBuilder, SamplingParams
from flexspec.builder import StepInputs
from flexspec.compiler.frontends.open_model import open_model
from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.graph import Graph, Value
from flexspec.kernels.cpu.build import supported_isas
from flexspec.models.registry import build_model
from flexspec.ops.rope import RopeConfig
from flexspec.types import DType

# Legend: T rows of a step, E hidden, F ffn, V vocab, H heads, G kv heads, D head dim.
V, E, F = VOCAB, tiny_models.HIDDEN, tiny_models.FFN
H, G, D = tiny_models.HEADS, tiny_models.KV_HEADS, tiny_models.HEAD_DIM
EPS, MAX_POSITIONS = 1e-5, 256
PROMPTS = ["hello 12 hello 12", "the world", "é 🎉"]
PARAMS = SamplingParams(max_tokens=32)
OPTIONS = ("--threads", "1", "--kv-tokens", "2048")


def decoder_layer(b: GraphBuilder, step: StepInputs, x_TE: Value, name: str) -> tuple[Value, Value, Value]:
    """The new hidden state, and both caches with the step's rows written."""
    h = b.rms_norm(x_TE, b.weight(f"{name}.input_layernorm.weight", (E,)), EPS)
    q = b.split_heads(b.linear(h, b.weight(f"{name}.self_attn.q_proj.weight", (H * D, E))), H)
    k = b.split_heads(b.linear(h, b.weight(f"{name}.self_attn.k_proj.weight", (G * D, E))), G)
    v = b.split_heads(b.linear(h, b.weight(f"{name}.self_attn.v_proj.weight", (G * D, E))), G)
    q = b.rope(q, step.positions_T, RopeConfig(), MAX_POSITIONS)
    k = b.rope(k, step.positions_T, RopeConfig(), MAX_POSITIONS)
    caches = b.kv_cache(f"{name}.k_cache", G, D), b.kv_cache(f"{name}.v_cache", G, D)
    o, k_new, v_new = b.attention(q, k, v, *caches, step, scale=D**-0.5)
    x = b.add(x_TE, b.linear(b.merge_heads(o), b.weight(f"{name}.self_attn.o_proj.weight", (E, H * D))))
    h = b.rms_norm(x, b.weight(f"{name}.post_attention_layernorm.weight", (E,)), EPS)
    gate = b.linear(h, b.weight(f"{name}.mlp.gate_proj.weight", (F, E)))
    up = b.linear(h, b.weight(f"{name}.mlp.up_proj.weight", (F, E)))
    return b.add(x, b.linear(b.swiglu(gate, up), b.weight(f"{name}.mlp.down_proj.weight", (E, F)))), k_new, v_new


def graph_by_hand() -> Graph:
    """One step of the LLM: token ids in, logits of the wanted rows and the written caches out."""
    b = GraphBuilder("llm", DType.F32)
    step = b.step_inputs()
    embedding = b.weight("embed_tokens.weight", (V, E))
    x, caches = b.embedding(step.ids_T, embedding), []
    for i in range(tiny_models.LAYERS):
        x, *written = decoder_layer(b, step, x, f"layers.{i}")
        caches += written
    rows = b.rms_norm(b.select_rows(x, step.logit_rows_L), b.weight("norm.weight", (E,)), EPS)
    return b.finish(b.linear(rows, embedding, name="logits_LV"), *caches)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Model files: a GGUF LLM with random weights, and as its SSM the same weights a little off."""
    folder = tmp_path_factory.mktemp("tiny")
    weights = tiny_models.random_weights(VOCAB)
    rng = np.random.default_rng(1)
    near = {name: w + 0.02 * rng.standard_normal(w.shape).astype(np.float32) for name, w in weights.items()}
    return tiny_models.write_gguf(folder / "llm.gguf", weights), tiny_models.write_huggingface(folder / "ssm", near)


@pytest.fixture(scope="module")
def artifact(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan is searched for two processors, and the artifact compiled for it."""
    model, ssm = models
    plan = flexspec.plan(
        model, ssm=ssm, machine="cpu2", acceptance="smollm2-135m", context=128, degrees=(2,), dtype="f32"
    )
    out = tmp_path_factory.mktemp("artifact") / "tiny.fspec"
    return flexspec.compile(model, ssm=ssm, plan=plan, dtype="f32", isas=supported_isas()[0], out=out).path


def opened(artifact: Path, draft: str) -> LLM:
    return LLM(artifact, draft=draft, threads=1, kv_tokens=2048, measure=False)


def generate(artifact: Path, draft: str) -> tuple[list[list[int]], list[str], int]:
    """Token ids and text of each prompt, and how many drafted tokens the LLM accepted."""
    with opened(artifact, draft) as llm:
        # In rounds: draft token trees, verify them in one pass of the LLM, accept, commit.
        done = llm.generate(PROMPTS, PARAMS)
    return [list(one.token_ids) for one in done], [one.text for one in done], sum(one.stats.accepted for one in done)


def test_a_graph_built_by_hand_is_the_models_own(models: tuple[Path, Path]) -> None:
    by_hand = graph_by_hand()
    assert by_hand.hash() == build_model(open_model(models[0]).config, DType.F32).hash()
    lowered = run_passes(by_hand, LLM_PASSES)  # the verifier runs after each
    operators = Counter(node.op for node in lowered.nodes)
    assert operators["linear_swiglu"] == operators["attention"] == tiny_models.LAYERS
    assert {node.attr("mode") for node in lowered.nodes if node.op == "attention"} == {"tree_verify"}


@pytest.mark.parametrize("draft", ["auto", "budget:16/depth=6/sources=suffix+ssm"])  # auto: what the plan says
def test_speculation_changes_the_time_and_not_the_tokens(artifact: Path, draft: str) -> None:
    tokens, texts, accepted = generate(artifact, "off")
    assert all(tokens) and accepted == 0
    tokens_drafted, texts_drafted, accepted = generate(artifact, draft)
    assert (tokens_drafted, texts_drafted) == (tokens, texts)
    assert accepted > 0, "nothing was accepted: equal tokens would say little"


def test_text_streams_as_it_is_committed(artifact: Path) -> None:
    with opened(artifact, "auto") as llm:
        whole = llm.generate(PROMPTS[0], PARAMS)[0]
        deltas = list(llm.stream(PROMPTS[0], PARAMS))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [whole.finish_reason]
    assert 1 < len(deltas) < len(whole.token_ids), "a round commits several tokens"


@pytest.mark.ranks
def test_two_ranks_write_what_one_process_writes(artifact: Path) -> None:
    _, texts, _ = generate(artifact, "off")
    with serving(artifact, "--ranks", "2", *OPTIONS) as server:
        ask = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 32, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=120.0).json()
    assert [choice["text"] for choice in answer["choices"]] == texts

"""Mixtral and Qwen3-MoE against transformers, from the folders that it writes: prefill, tree steps, greedy tokens.

Legend: T rows, V vocab.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from step_models import chain_rows, random_tree, tree_rows
from transformers_oracle import expected_logits

from flexspec.compiler.frontends.loaded_model import LoadedModel
from flexspec.compiler.frontends.open_model import check_weights, open_model
from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.errors import ModelConfigError, WeightError
from flexspec.graph import Graph
from flexspec.models.registry import build_model, expected_weights
from flexspec.runtime.executors.pages import pack_rows
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.tree import TokenTree
from flexspec.types import DType

pytestmark = pytest.mark.slow(reason="runs the models of transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5}),
    "mixtral_one_expert_a_row": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 12}),
    "qwen3_moe": ("Qwen3Moe", QWEN),
    "qwen3_moe_normalized": ("Qwen3Moe", QWEN | {"norm_topk_prob": True, "tie_word_embeddings": True}),
    "qwen3_moe_some_layers_dense": ("Qwen3Moe", QWEN | {"decoder_sparse_step": 2, "attention_bias": True}),
    "qwen3_moe_listed_layers_dense": ("Qwen3Moe", QWEN | {"mlp_only_layers": [0, 2]}),
}
PAGES, MAIN, OTHER = 8, [3, 1], [0, 6]


def oracle(case: str, folder: Path) -> transformers.PreTrainedModel:
    """A random float32 transformers model, saved to ``folder``."""
    kind, changes = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    torch.manual_seed(len(case))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():  # norms and biases too: their defaults of 1 and 0 would hide faults
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.25)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel, Graph]:
    folder = tmp_path_factory.mktemp(request.param)
    model = oracle(request.param, folder)
    loaded = open_model(folder)
    graph = build_model(loaded.config, DType.F32)
    check_weights(loaded.weights, expected_weights(graph), folder)
    return model, loaded, graph


def executor_of(loaded: LoadedModel, graph: Graph) -> ReferenceExecutor:
    weights = {name: loaded.weights.get(name) for name in expected_weights(graph)}
    return ReferenceExecutor(graph, weights, pages=PAGES, max_rows=96)


@pytest.mark.parametrize("lowered", [False, True], ids=["canonical", "lowered"])
def test_prefill_and_tree_steps(pair: tuple[Any, LoadedModel, Graph], lowered: bool) -> None:
    model, loaded, graph = pair
    executor = executor_of(loaded, run_passes(graph, LLM_PASSES) if lowered else graph)
    rng = np.random.default_rng(5)
    prompts = [[int(t) for t in rng.integers(0, 97, n)] for n in (29, 40)]
    steps = [([TokenTree.chain(prompt) for prompt in prompts], [[], []])]
    steps += [([random_tree(rng, n, 97) for n in sizes], prompts) for sizes in ((22, 13), (1, 9))]
    for trees, committed in steps:
        rows = [
            tree_rows(tree, len(tokens), pages) if tokens else chain_rows(tree.tokens, 0, pages)
            for tree, tokens, pages in zip(trees, committed, (MAIN, OTHER), strict=True)
        ]
        found = executor.step(pack_rows(rows), want_logits=True)
        wanted = np.concatenate([expected_logits(model, c, t) for c, t in zip(committed, trees, strict=True)])
        assert found.logits_LV is not None and np.abs(wanted).max() > 1.0
        np.testing.assert_allclose(found.logits_LV, wanted, rtol=0, atol=1e-4)


def test_greedy_tokens(pair: tuple[Any, LoadedModel, Graph]) -> None:
    model, loaded, graph = pair
    executor = executor_of(loaded, graph)
    prompt = [5, 17, 3, 80]
    with torch.no_grad():
        wanted = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, 4), do_sample=False, eos_token_id=None, pad_token_id=0,
            min_new_tokens=16, max_new_tokens=16,
        )[0].tolist()  # fmt: skip
    tokens, rows = list(prompt), prompt
    while len(tokens) < len(wanted):
        result = executor.step(
            pack_rows([chain_rows(rows, len(tokens) - len(rows), MAIN, all_logits=False)]), want_logits=False
        )
        rows = [int(result.argmax_L[0])]
        tokens += rows
    assert tokens == wanted


def changed(folder: Path, **settings: Any) -> Path:
    body = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(body | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_shared_experts": 1}, "n_shared_experts = 1"),
        ({"shared_expert_intermediate_size": 20}, "shared_expert_intermediate_size = 20"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7"),
        ({"num_experts": 7}, "num_experts = 7"),
        ({"num_local_experts": 0}, "num_local_experts = 0"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers = \[3\]"),
        ({"mlp_only_layers": [-1]}, "list of non-negative integers"),
        ({"num_hidden_layers": 2_000_000_000}, "at most 4096 layers"),
        ({"mlp_only_layers": [0, 1, 2]}, r"mlp_only_layers = \[0, 1, 2\]"),
        ({"decoder_sparse_step": 4}, "decoder_sparse_step = 4"),
        ({"moe_intermediate_size": "20"}, "moe_intermediate_size = '20'"),
    ],
)
def test_settings_that_are_not_built_are_refused_by_name(tmp_path: Path, settings: Any, message: str) -> None:
    oracle("qwen3_moe", tmp_path)
    with pytest.raises(ModelConfigError, match=message):
        open_model(changed(tmp_path, **settings))


def test_a_window_of_mixtral_counts_only_where_it_is_named(tmp_path: Path) -> None:
    oracle("mixtral", tmp_path)
    assert open_model(changed(tmp_path, sliding_window=None)).config.experts == 5
    with pytest.raises(ModelConfigError, match="sliding_window=64"):
        open_model(changed(tmp_path, sliding_window=64))


def test_any_number_of_experts_is_held_against_the_file(tmp_path: Path) -> None:
    oracle("mixtral", tmp_path)
    with pytest.raises(WeightError, match=r"lacks experts \[5, 6, 7, 8, 9, 10, 11, 12\]"):
        open_model(changed(tmp_path, num_local_experts=2_000_000_000))


def test_bad_configurations_are_refused(tmp_path: Path) -> None:
    oracle("mixtral", tmp_path)
    config = open_model(tmp_path).config
    for field in ("experts", "experts_per_token", "expert_ffn_size"):
        with pytest.raises(ModelConfigError, match=f"{field}=0"):
            build_model(replace(config, **{field: 0}), DType.F32)
    with pytest.raises(ModelConfigError, match="experts_per_token=6"):
        build_model(replace(config, experts_per_token=6), DType.F32)


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        ("experts.3.w2", {}, r"lacks experts \[3\] of layers.1.mlp.experts.down_proj.weight"),
        ("", {"experts.5.w2": (48, 80)}, r"has experts \[5\] of layers.1.mlp.experts.down_proj.weight"),
        ("", {"experts.00.w2": (48, 80)}, "'layers.1.mlp.experts.down_proj.weight' twice"),
        (
            "",
            {"experts.w2": (5, 48, 80)},
            "has layers.1.block_sparse_moe.experts.w2.weight that the model does not use",
        ),
        ("gate", {}, "lacks layers.1.mlp.gate.weight"),
        ("experts.3.w2", {"experts.3.w2": (48, 81)}, r"experts.3.w2.weight of shape \[48, 81\]"),
        ("experts.0.w2", {"experts.0.w2": (48, 81)}, r"down_proj.weight \[5, 48, 81\] instead of \[5, 48, 80\]"),
    ],
)
def test_every_expert_is_used_once(tmp_path: Path, drop: str, add: dict[str, tuple[int, ...]], message: str) -> None:
    from safetensors.numpy import load_file, save_file

    oracle("mixtral", tmp_path)
    prefix = "model.layers.1.block_sparse_moe."
    tensors = load_file(tmp_path / "model.safetensors")
    if drop:
        del tensors[f"{prefix}{drop}.weight"]
    tensors |= {f"{prefix}{name}.weight": np.zeros(shape, np.float32) for name, shape in add.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=message):
        model = open_model(tmp_path)
        check_weights(model.weights, expected_weights(build_model(model.config, DType.F32)), tmp_path)
        model.weights.get("layers.1.mlp.experts.down_proj.weight")

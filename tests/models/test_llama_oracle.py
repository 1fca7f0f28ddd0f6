"""Logits of every Llama-like family against transformers, over prefill, random tree steps and decode steps.

Legend: T rows, R requests, V vocab, S committed tokens.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from transformers_oracle import expected_logits

from flexspec.compiler.passes.pipeline import LLM_PASSES, run_passes
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model, expected_weights
from flexspec.ops.rope import RopeConfig
from flexspec.runtime.executors.step import StepBatch
from flexspec.runtime.reference.executor import ReferenceExecutor
from flexspec.tree import TokenTree
from flexspec.types import PAGE_TOKENS, DType

pytestmark = pytest.mark.slow(reason="runs the models of transformers")

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
CASES = {
    "llama": ("llama", "LlamaConfig", {}),
    "llama_tied": ("llama", "LlamaConfig", {"tie_word_embeddings": True}),
    "llama_biased": ("llama", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama_linear": (
        "llama",
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama3_scaling": ("llama", "LlamaConfig", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", "MistralConfig", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("qwen2", "Qwen2Config", {}),
    "qwen2_yarn": ("qwen2", "Qwen2Config", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", "Qwen3Config", {"head_dim": 16}),
    "qwen3_tied": ("qwen3", "Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
}


def oracle(case: str) -> tuple[transformers.PreTrainedModel, ModelConfig]:
    """A random float32 transformers model and the configuration a loader would give for it."""
    family, cls, changes = CASES[case]
    hf_config = getattr(transformers, cls)(**{**SIZES, **changes})
    torch.manual_seed(len(case))
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():  # norms and biases too: their defaults of 1 and 0 would hide faults
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.25)
    rope = dict(changes.get("rope_parameters", {"rope_theta": hf_config.rope_parameters["rope_theta"]}))
    names = {"rope_type": "kind", "rope_theta": "theta", "original_max_position_embeddings": "original_max_positions"}
    config = ModelConfig(
        family=family, vocab_size=97, hidden_size=48, layers=3, heads=6, kv_heads=2,
        head_dim=changes.get("head_dim", 8), ffn_size=80, norm_eps=1e-5, max_positions=256,
        rope=RopeConfig(**{names.get(key, key): value for key, value in rope.items()}),
        tied_embeddings=changes.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or "attention_bias" in changes, output_bias="attention_bias" in changes,
        mlp_bias="mlp_bias" in changes, qk_norm=family == "qwen3",
    )  # fmt: skip
    return model, config


def weights_of(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    return {name.removeprefix("model."): value.numpy() for name, value in model.state_dict().items()}


def random_tree(rng: np.random.Generator, size: int) -> TokenTree:
    parents = (-1, *(int(rng.integers(0, i)) for i in range(1, size)))
    return TokenTree(tuple(int(t) for t in rng.integers(0, 97, size)), parents)


def batch_of(trees: list[TokenTree], contexts: list[int], causal: list[bool], pages: np.ndarray) -> StepBatch:
    """One step over several requests, all rows' logits wanted."""
    rows = sum(len(tree) for tree in trees)
    words = max(-(-len(tree) // 64) for tree in trees)
    return StepBatch(
        ids_T=np.concatenate([np.array(tree.tokens, np.int32) for tree in trees]),
        positions_T=np.concatenate(
            [s + np.array(tree.depths, np.int32) for s, tree in zip(contexts, trees, strict=True)]
        ),
        starts_R1=np.cumsum([0, *(len(tree) for tree in trees)], dtype=np.int32),
        contexts_R=np.array(contexts, np.int32),
        causal_R=np.array(causal, np.uint8),
        page_table_RB=pages,
        ancestors_TW=np.concatenate([tree.ancestors(words) for tree in trees]),
        logit_rows_L=np.arange(rows, dtype=np.int32),
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lowered", [False, True], ids=["canonical", "lowered"])
def test_prefill_tree_and_decode(case: str, lowered: bool) -> None:
    model, config = oracle(case)
    graph = build_model(config, DType.F32)
    if lowered:
        graph = run_passes(graph, LLM_PASSES)
    weights = weights_of(model)
    assert set(expected_weights(graph)) == set(weights) - ({"lm_head.weight"} if config.tied_embeddings else set())
    executor = ReferenceExecutor(graph, weights, pages=16, max_rows=256)
    rng = np.random.default_rng(5)
    pages = rng.permutation(16)[:8].reshape(2, 4).astype(np.int32)
    prompts = [[int(t) for t in rng.integers(0, 97, n)] for n in (29, 61)]
    trees = [TokenTree.chain(prompt) for prompt in prompts]
    _compare(executor, model, trees, [[], []], [True, True], pages)
    for sizes in ((70, 13), (1, 9), (5, 1)):  # trees wider than a mask word, one node, across a page edge
        trees = [random_tree(rng, n) for n in sizes]
        _compare(executor, model, trees, prompts, [False, False], pages)
    _compare(executor, model, [random_tree(rng, 6), TokenTree.chain([3])], prompts, [False, True], pages)


def _compare(executor, model, trees, committed, causal, pages) -> None:
    batch = batch_of(trees, [len(tokens) for tokens in committed], causal, pages)
    result = executor.step(batch, want_logits=True)
    wanted = np.concatenate([expected_logits(model, c, t) for c, t in zip(committed, trees, strict=True)])
    assert np.abs(wanted).max() > 1.0, "logits large enough for the tolerance to mean something"
    np.testing.assert_allclose(result.logits_LV, wanted, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(result.argmax_L, result.logits_LV.argmax(-1))


def test_accepted_path_after_move_kv_equals_fresh_prefill() -> None:
    """Accept the last sibling at each level, gather its K/V, compare the cache with a prefill of the same tokens."""
    model, config = oracle("llama")
    graph = build_model(config, DType.F32)
    tree = TokenTree((7, 1, 2, 3, 4, 5, 6), (-1, 0, 0, 2, 2, 4, 4))
    path = [0, 2, 4, 6]
    prompt = list(range(10, 40))  # the path crosses a page edge
    pages = np.array([[3, 1]], np.int32)
    executor = ReferenceExecutor(graph, weights_of(model), pages=4, max_rows=64)
    executor.step(batch_of([TokenTree.chain(prompt)], [0], [True], pages), want_logits=False)
    batch = batch_of([tree], [30], [False], pages)
    executor.step(batch, want_logits=False)
    slots = batch.slots()
    executor.move_kv(slots[path], slots[: len(path)])
    fresh = ReferenceExecutor(graph, weights_of(model), pages=4, max_rows=64)
    tokens = prompt + [tree.tokens[i] for i in path]
    whole = batch_of([TokenTree.chain(tokens)], [0], [True], pages)
    fresh.step(whole, want_logits=False)
    assert len(tokens) > PAGE_TOKENS
    found, wanted = executor.read_kv(whole.slots()), fresh.read_kv(whole.slots())
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("taps", [(0, 2), (1,), (3,)])
def test_taps_are_the_hidden_states(taps: tuple[int, ...]) -> None:
    model, config = oracle("llama3_scaling")
    executor = ReferenceExecutor(build_model(config, DType.F32, taps=taps), weights_of(model), pages=2, max_rows=32)
    tokens = list(range(20))
    batch = batch_of([TokenTree.chain(tokens)], [0], [True], np.array([[1]], np.int32))
    found = executor.step(batch, want_logits=True)
    hooks: dict[int, torch.Tensor] = {}  # states by number of layers passed, unnormed (hidden_states ends normed)
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, args, i=i: hooks.__setitem__(i, args[0]))
        layer.register_forward_hook(lambda _, __, out, i=i: hooks.__setitem__(i + 1, out))
    with torch.no_grad():
        final = model.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state
    wanted = torch.cat([*(hooks[tap][0] for tap in taps), final[0]], -1).numpy()
    np.testing.assert_allclose(found.features_TE, wanted, rtol=0, atol=1e-4)

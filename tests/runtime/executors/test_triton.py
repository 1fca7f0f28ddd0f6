"""The GPU executor under Triton's interpreter against the reference executor: a tiny Llama in float32, end to end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from interpreted import interpreted
from numpy.typing import NDArray

from flexspec.compiler.passes.pipeline import LLM_PASSES, SSM_PASSES, run_passes
from flexspec.errors import ToolchainError, WeightError
from flexspec.graph import Graph
from flexspec.models.config import ModelConfig
from flexspec.models.fused_state import build_fused_state
from flexspec.models.llama import build_llama
from flexspec.models.registry import build_model
from flexspec.runtime.executors.step import StepBatch
from flexspec.runtime.executors.triton import TritonExecutor
from flexspec.runtime.executors.triton_device import INTERPRETER
from flexspec.tree import TokenTree
from flexspec.types import PAGE_TOKENS, DType, Role

pytestmark = pytest.mark.slow(reason="interprets kernels in processes of their own")

CONFIG = ModelConfig(
    family="llama", vocab_size=61, hidden_size=48, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_size=64,
    norm_eps=1e-5, max_positions=256,
)  # fmt: skip
PAGES = 8
TREE = TokenTree((7, 11, 13, 11, 17, 19), (-1, 0, 0, 1, 1, 4))


def random_weights(graph: Graph, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    weights = {}
    for value in graph.inputs_of(Role.WEIGHT):
        dims = tuple(dim for dim in value.type.dims if isinstance(dim, int))
        weights[value.name] = (rng.standard_normal(dims) * (0.2 if len(dims) > 1 else 1.0)).astype(np.float32)
    return weights


def batch_of(parts: list[tuple[list[int] | TokenTree, int, list[int]]]) -> StepBatch:
    """A step of requests (chain of tokens or tree, committed context, pages); logits of every row are wanted."""
    trees = [part if isinstance(part, TokenTree) else TokenTree.chain(part) for part, _, _ in parts]
    words = max((len(tree) + 63) // 64 for tree in trees)
    width = max(len(pages) for _, _, pages in parts)
    contexts = np.array([context for _, context, _ in parts], np.int32)
    positions = [context + np.array(tree.depths, np.int32) for context, tree in zip(contexts, trees, strict=True)]
    starts = np.cumsum([0, *map(len, trees)]).astype(np.int32)
    return StepBatch(
        ids_T=np.array([token for tree in trees for token in tree.tokens], np.int32),
        positions_T=np.concatenate(positions).astype(np.int32),
        starts_R1=starts,
        contexts_R=contexts,
        causal_R=np.array([not isinstance(part, TokenTree) for part, _, _ in parts], np.uint8),
        page_table_RB=np.array([pages + [0] * (width - len(pages)) for _, _, pages in parts], np.int32),
        ancestors_TW=np.concatenate([tree.ancestors(words) for tree in trees]),
        logit_rows_L=np.arange(starts[-1], dtype=np.int32),
    )


class Pair:
    """Both executors fed with the same steps; keeps the largest difference of logits and every argmax."""

    def __init__(self, graph: Graph, **options: Any) -> None:
        from flexspec.runtime.reference.executor import ReferenceExecutor

        weights = random_weights(graph)
        self.reference = ReferenceExecutor(graph, weights, PAGES, 128)
        self.triton = TritonExecutor(graph, weights, PAGES, 128, INTERPRETER, **options)
        self.expected: list[int] = []
        self.tokens: list[int] = []
        self.difference = 0.0

    def step(
        self, parts: list[tuple[list[int] | TokenTree, int, list[int]]], features_TE: NDArray[np.float32] | None = None
    ) -> list[int]:
        batch = replace(batch_of(parts), features_TE=features_TE)
        right, ours = (each.step(batch, want_logits=True) for each in (self.reference, self.triton))
        assert right.logits_LV is not None and ours.logits_LV is not None
        self._compare(right.logits_LV, ours.logits_LV)
        if right.features_TE is not None:
            assert ours.features_TE is not None
            self._compare(right.features_TE, ours.features_TE)
        again = self.triton.step(batch, want_logits=False, want_features=False)  # a repeated step changes nothing
        assert again.logits_LV is None and again.features_TE is None
        assert again.argmax_L.tolist() == ours.argmax_L.tolist()
        self.expected += right.argmax_L.tolist()
        self.tokens += ours.argmax_L.tolist()
        return right.argmax_L.tolist()

    def accept(self, nodes: list[int], context: int, pages: list[int]) -> None:
        """Commit the path ``nodes`` of a tree whose rows lie behind ``context``."""
        slot = lambda index: pages[index // PAGE_TOKENS] * PAGE_TOKENS + index % PAGE_TOKENS  # noqa: E731
        src = np.array([slot(context + node) for node in nodes], np.int32)
        dst = np.array([slot(context + depth) for depth in range(len(nodes))], np.int32)
        for each in (self.reference, self.triton):
            each.move_kv(src, dst)

    def report(self) -> dict[str, Any]:
        slots = np.arange(PAGES * PAGE_TOKENS, dtype=np.int32)
        caches = [each.read_kv(slots) for each in (self.reference, self.triton)]
        for name, right in caches[0].items():
            self._compare(right, caches[1][name])
        self.triton.close()
        return {"expected": self.expected, "tokens": self.tokens, "difference": self.difference}

    def _compare(self, right: NDArray[np.float32], ours: NDArray[np.float32]) -> None:
        self.difference = max(self.difference, float(np.abs(right - ours).max()))


def plain_decoding() -> dict[str, Any]:
    """Speculation off: a prompt, then one token a step, across a page edge; canonical graph; several splits."""
    pair, pages = Pair(build_llama(CONFIG, DType.F32), split_keys=32), [3, 5]
    token, context = pair.step([(list(range(1, 31)), 0, pages)])[-1], 30
    for _ in range(4):
        token, context = pair.step([([token], context, pages)])[-1], context + 1
    return pair.report()


def tree_decoding() -> dict[str, Any]:
    """A tree, its deepest path accepted by moving K/V, then a plain step behind it; lowered graph with features."""
    pair, pages = Pair(run_passes(build_llama(CONFIG, DType.F32, taps=(1,)), LLM_PASSES)), [6, 1]
    pair.step([(list(range(20, 49)), 0, pages)])
    pair.step([(TREE, 29, pages)])
    pair.accept([0, 1, 4, 5], 29, pages)
    pair.step([([23], 33, pages)])
    return pair.report()


def two_requests() -> dict[str, Any]:
    """Prefill of one request beside a tree of another, then trees of both, more than 64 nodes in one of them."""
    pair = Pair(run_passes(build_llama(CONFIG, DType.F32), LLM_PASSES), max_tree_tokens=8)
    first, second = [2, 7, 4], [0]
    pair.step([(list(range(5, 17)), 0, first)])
    pair.step([(TREE, 12, first), ([9, 8, 7], 0, second)])
    wide = TokenTree(tuple(i % 61 for i in range(70)), (-1, *(i // 2 for i in range(69))))
    pair.step([(wide, 12, first), (TREE, 3, second)])
    return pair.report()


def incremental() -> dict[str, Any]:
    """An SSM's graph: prompt, one token, then the two children of a node in one step."""
    pair, pages = Pair(run_passes(build_llama(CONFIG, DType.F32), SSM_PASSES)), [1]
    pair.step([([3, 1, 4], 0, pages)])
    pair.step([([5], 3, pages)])
    pair.step([(TokenTree((5, 9, 2), (-1, 0, 0)), 3, pages)])
    return pair.report()


def mixture_of_experts() -> dict[str, Any]:
    """The experts run through torch between the kernel's attention: a prompt, a tree, a step behind it."""
    config = replace(CONFIG, family="mixtral", experts=5, experts_per_token=2, expert_ffn_size=20)
    pair, pages = Pair(run_passes(build_model(config, DType.F32), LLM_PASSES)), [6, 1]
    pair.step([(list(range(20, 49)), 0, pages)])
    pair.step([(TREE, 29, pages)])
    pair.accept([0, 1, 4, 5], 29, pages)
    pair.step([([23], 33, pages)])
    return pair.report()


def hidden_state_ssm() -> dict[str, Any]:
    """An SSM that reads features and returns its own: a prompt, then two children of a node."""
    pair, pages = Pair(run_passes(build_fused_state(CONFIG, DType.F32, reduced_vocab_size=29), SSM_PASSES)), [2]
    rng = np.random.default_rng(5)
    pair.step([([3, 1, 4, 1, 5], 0, pages)], rng.standard_normal((5, 48)).astype(np.float32))
    pair.step([(TokenTree((9, 2, 6), (-1, 0, 0)), 5, pages)], rng.standard_normal((3, 48)).astype(np.float32))
    return pair.report()


def refusals() -> dict[str, str]:
    """Errors of constructors that can only be reached under the interpreter."""
    graph, told = build_llama(CONFIG, DType.F32), {}
    weights = random_weights(graph)
    wrong = {
        "bf16": (build_llama(CONFIG, DType.BF16), weights),
        "missing": (graph, {name: array for name, array in weights.items() if name != "norm.weight"}),
        "shape": (graph, weights | {"norm.weight": np.ones(3, np.float32)}),
    }
    for name, (each, arrays) in wrong.items():
        try:
            TritonExecutor(each, arrays, PAGES, 16, INTERPRETER)
        except (ToolchainError, WeightError) as error:
            told[name] = str(error)
    return told


def moves_in_order() -> dict[str, bool]:
    """move_kv against the reference for copies that overlap in either direction and for one slot written twice."""
    pair = Pair(build_llama(CONFIG, DType.F32))
    pair.step([(list(range(1, 21)), 0, [0])])
    lists = {
        "forward": ([3, 5, 9], [2, 3, 4]),
        "chained": ([2, 3, 4], [3, 4, 5]),
        "twice": ([6, 7], [10, 10]),
        "nothing": ([], []),
    }
    for src, dst in lists.values():
        for each in (pair.reference, pair.triton):
            each.move_kv(np.array(src, np.int32), np.array(dst, np.int32))
    return {"same": pair.report()["difference"] < 2e-5}


GREEDY = (plain_decoding, tree_decoding, two_requests, incremental, mixture_of_experts, hidden_state_ssm)


def all_scenarios() -> dict[str, dict[str, Any]]:
    runs = (*GREEDY, refusals, moves_in_order)
    return {run.__name__: run() for run in runs}


@pytest.fixture(scope="module")
def reports() -> Any:
    return interpreted(__file__, "all_scenarios")


@pytest.mark.parametrize("name", [run.__name__ for run in GREEDY])
def test_greedy_tokens_equal_the_reference(reports: dict[str, Any], name: str) -> None:
    report = reports[name]
    assert report["tokens"] == report["expected"] and len(set(report["tokens"])) >= 3
    assert report["difference"] < 2e-5


def test_wrong_weights_and_bf16_in_the_interpreter_are_told(reports: dict[str, Any]) -> None:
    told = reports["refusals"]
    assert "FS302" in told["bf16"] and "interpreter" in told["bf16"]
    assert "norm.weight is missing" in told["missing"] and "[3]" in told["shape"]


def test_moves_happen_in_order(reports: dict[str, Any]) -> None:
    assert reports["moves_in_order"] == {"same": True}


def test_device_that_cannot_run_the_kernels_is_told() -> None:
    import torch

    graph = build_llama(CONFIG, DType.F32)
    with pytest.raises(ToolchainError, match="TRITON_INTERPRET=1"):
        TritonExecutor(graph, random_weights(graph), PAGES, 16, INTERPRETER)
    if not torch.cuda.is_available():
        with pytest.raises(ToolchainError, match="no CUDA device"):
            TritonExecutor(graph, random_weights(graph), PAGES, 16)

"""A row's bits never depend on how it was reached: alone, among others, in a tree, in a prompt, on any thread count.

This is what makes speculation on equal to speculation off in bytes, so every comparison here is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from step_models import chain_rows, on_cpu, random_tree, slots, tiny_config, tiny_llm, tree_rows

from flexspec.kernels.cpu.build import supported_isas
from flexspec.runtime.executors.cpu import CpuExecutor
from flexspec.runtime.executors.pages import RowGroup, pack_rows
from flexspec.tree import TokenTree
from flexspec.types import DType

# Sizes that are multiples of nothing: padding columns, half tiles and a page edge are all in play.
CONFIG = tiny_config(heads=6, kv_heads=2, head_dim=48, hidden_size=84, ffn_size=100, vocab_size=211)
MAIN, OTHER = [9, 1, 5, 7], [0, 2, 4, 6]
CONTEXT = 45
BEST = supported_isas()[0]
CASES = list(dict.fromkeys([(BEST, "bf16"), (BEST, "f32"), ("avx2", "bf16")]))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def executors(request: pytest.FixtureRequest) -> Iterator[tuple[CpuExecutor, CpuExecutor]]:
    """The same program with one thread and with two."""
    isa, dtype = request.param
    if isa not in supported_isas():
        pytest.skip(f"this CPU has no {isa}")
    graph, weights = tiny_llm(CONFIG, DType(dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXSPEC_CPU_ISA", isa)
        pair = on_cpu(graph, weights), on_cpu(graph, weights, threads=2)
    yield pair
    for executor in pair:
        executor.close()


def ids_of(count: int, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, CONFIG.vocab_size, count)]


def logits(executor: CpuExecutor, *groups: RowGroup) -> NDArray[np.float32]:
    result = executor.step(pack_rows(groups), want_logits=True)
    assert result.logits_LV is not None and np.isfinite(result.logits_LV).all()
    return result.logits_LV


def decoded(executor: CpuExecutor, tokens: Sequence[int], pages: Sequence[int]) -> NDArray[np.float32]:
    """Logits of each token, fed one at a time behind the prompt."""
    logits(executor, chain_rows(ids_of(CONTEXT), 0, pages))
    return np.concatenate([logits(executor, chain_rows([t], CONTEXT + i, pages)) for i, t in enumerate(tokens)])


@pytest.mark.parametrize("nodes", [2, 5, 9, 17, 65])
def test_a_tree_gives_each_node_the_bits_of_plain_decoding(
    executors: tuple[CpuExecutor, CpuExecutor], nodes: int
) -> None:
    executor = executors[0]
    tree = random_tree(np.random.default_rng(nodes), nodes, CONFIG.vocab_size)
    logits(executor, chain_rows(ids_of(CONTEXT), 0, MAIN))
    whole = logits(executor, tree_rows(tree, CONTEXT, MAIN))
    for leaf in range(nodes - 1, max(0, nodes - 9), -1):
        path = tree.path(leaf)
        np.testing.assert_array_equal(whole[path], decoded(executor, [tree.tokens[i] for i in path], OTHER))


def test_prompt_pieces_of_any_size_give_the_same_bits(executors: tuple[CpuExecutor, CpuExecutor]) -> None:
    executor, ids = executors[0], ids_of(90)
    whole = logits(executor, chain_rows(ids, 0, MAIN))
    for sizes in ([1] * 90, [31, 1, 1, 57], [64, 26], [17, 16, 40, 17]):
        start, pieces = 0, []
        for size in sizes:
            pieces.append(logits(executor, chain_rows(ids[start : start + size], start, OTHER)))
            start += size
        np.testing.assert_array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize("company", [1, 4, 8, 16, 63])
def test_a_row_has_the_same_bits_alone_and_in_company(executors: tuple[CpuExecutor, CpuExecutor], company: int) -> None:
    executor = executors[0]
    logits(executor, chain_rows(ids_of(CONTEXT), 0, MAIN))
    alone = logits(executor, chain_rows([7], CONTEXT, MAIN))
    others = chain_rows(ids_of(company, seed=company), 0, OTHER)
    np.testing.assert_array_equal(logits(executor, others, chain_rows([7], CONTEXT, MAIN))[-1:], alone)
    np.testing.assert_array_equal(logits(executor, chain_rows([7], CONTEXT, MAIN), others)[:1], alone)
    star = TokenTree((7, *ids_of(company, seed=2)), (-1,) + (0,) * company)
    np.testing.assert_array_equal(logits(executor, tree_rows(star, CONTEXT, MAIN))[:1], alone)


@pytest.mark.slow(reason="a race does not show every time: 12 rounds")
def test_thread_counts_give_the_same_bits(executors: tuple[CpuExecutor, CpuExecutor]) -> None:
    rng = np.random.default_rng(5)
    for round_ in range(12):  # a race would not show every time
        tree = random_tree(rng, int(rng.integers(2, 40)), CONFIG.vocab_size)
        context = int(rng.integers(30, 50))
        results = []
        for executor in executors:
            logits(executor, chain_rows(ids_of(context, seed=round_), 0, MAIN))
            step = tree_rows(tree, context, MAIN), chain_rows(ids_of(13), 0, OTHER)
            results.append(np.concatenate([logits(executor, *step), logits(executor, chain_rows([3], context, MAIN))]))
        np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.slow(reason="a race does not show every time: 40 rounds")
def test_two_threads_may_write_neighbouring_tokens(executors: tuple[CpuExecutor, CpuExecutor]) -> None:
    """bfloat16 values of two tokens share 32-bit words: each thread must write its half alone."""
    for round_ in range(40):
        ids = ids_of(64, seed=round_)
        results = []
        for executor in executors:
            logits(executor, chain_rows(ids[:44], 0, MAIN))
            for at in range(44, 64, 2):  # two rows, one a thread, both at the start of its share
                logits(executor, chain_rows(ids[at : at + 2], at, MAIN))
            results.append(logits(executor, chain_rows([5], 64, MAIN)))
        np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("context", [45, 60, 63, 64])
def test_cache_after_acceptance_equals_a_fresh_prefill(
    executors: tuple[CpuExecutor, CpuExecutor], context: int
) -> None:
    """Accepting the last sibling at each level moves most: every accepted slot comes from somewhere else."""
    executor = executors[1]
    text = ids_of(context, seed=context)
    logits(executor, chain_rows(text, 0, MAIN))
    for round_ in range(3):
        comb = random_tree(np.random.default_rng(round_), 22, CONFIG.vocab_size, "comb")
        path = comb.path(21)
        logits(executor, tree_rows(comb, len(text), MAIN))
        source, target = [len(text) + node for node in path], [len(text) + i for i in range(len(path))]
        executor.move_kv(slots(MAIN, source), slots(MAIN, target))
        text += [comb.tokens[node] for node in path]
    continued = logits(executor, chain_rows([11], len(text), MAIN))
    logits(executor, chain_rows(text, 0, OTHER))
    np.testing.assert_array_equal(continued, logits(executor, chain_rows([11], len(text), OTHER)))


def test_what_an_earlier_request_left_in_a_page_does_not_matter(executors: tuple[CpuExecutor, CpuExecutor]) -> None:
    executor = executors[0]
    fresh = logits(executor, chain_rows(ids_of(20), 0, [12]))
    logits(executor, chain_rows(ids_of(32, seed=9), 0, [12]))
    np.testing.assert_array_equal(logits(executor, chain_rows(ids_of(20), 0, [12])), fresh)

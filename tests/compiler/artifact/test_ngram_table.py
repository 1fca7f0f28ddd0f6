"""The n-gram table against counts made with dictionaries, its bytes and its damage."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexspec.compiler.artifact.ngram_table import build_table, load_table, save_table
from flexspec.drafters.ngram import PROB_STEP, SUCCESSORS, check_table, extend_hash
from flexspec.errors import ArtifactError, TuneError
from flexspec.runtime.drafters.ngram import NgramModel

Sequences = list[tuple[list[int], list[int]]]
tokens = st.lists(st.integers(0, 5), max_size=12)


def reference(sequences: Sequences, order: int, context: tuple[int, ...]) -> dict[int, float]:
    """Interpolated Witten-Bell, straight from its definition."""
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for prompt, answer in sequences:
        text = prompt + answer
        for t in range(len(prompt), len(text)):
            for n in range(order):
                if t - n >= 0:
                    counts[tuple(text[t - n : t])][text[t]] += 1
    total = sum(counts[()].values())
    law = {token: count / total for token, count in counts[()].items()}
    for n in range(1, len(context) + 1):
        seen = counts.get(context[-n:])
        if not seen:
            break
        mass = sum(seen.values()) + len(seen)
        law = {token: (seen[token] + len(seen) * chance) / mass for token, chance in law.items()}
    return law


def corpus(seed: int, sequences: int, vocab: int) -> Sequences:
    """Sentences with habits: each token has a favourite successor."""
    rng = random.Random(seed)
    made: Sequences = []
    for _ in range(sequences):
        text = [rng.randrange(vocab)]
        while len(text) < 60:
            text.append((text[-1] * 7 + 3) % vocab if rng.random() < 0.6 else rng.randrange(vocab))
        made.append((text[:20], text[20:]))
    return made


@pytest.mark.slow(reason="hypothesis")
@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=5), st.integers(2, 5))
def test_small_tables_hold_exactly_the_counts(sequences: Sequences, order: int) -> None:
    if not any(answer for _, answer in sequences):
        return
    model = NgramModel(build_table(sequences, order))
    contexts = {tuple(p[-n:]) for p, a in sequences for n in range(1, order) if len(p) >= n} | {(), (5,), (4, 4)}
    for context in contexts:
        context = context[-(order - 1) :]
        want = reference(sequences, order, context)
        have = dict(model.successors(context))
        assert set(have) == set(want)  # six tokens, eight successors: none is cut
        for token, chance in want.items():
            assert have[token] == pytest.approx(chance, rel=order * PROB_STEP * 0.52)
        assert list(have.values()) == sorted(have.values(), reverse=True)


def test_prompts_give_context_and_are_not_counted() -> None:
    model = NgramModel(build_table([([1, 2, 3], [4]), ([9, 9, 9, 9], [4])], order=3))
    assert [token for token, _ in model.successors((2, 3))] == [4]
    assert [token for token, _ in model.successors((1, 2))] == [4], "3 only ever stood in a prompt"


def test_order_of_contexts_matters_and_unseen_ones_back_off() -> None:
    model = NgramModel(build_table([([1, 2], [3]), ([2, 1], [4])] * 5, order=3))
    assert model.successors((1, 2))[0][0] == 3 and model.successors((2, 1))[0][0] == 4
    assert model.successors((7, 2)) == model.successors((2,)) and model.successors((7,)) == model.successors(())


def test_pruning_keeps_the_size_and_the_most_useful_entries(tmp_path: Path) -> None:
    sequences = corpus(1, 400, 300)
    whole = build_table(sequences, order=4)
    cut = build_table(sequences, order=4, max_bytes=20_000)
    save_table(cut, tmp_path / "cut")
    assert sum(array.nbytes for array in whole.values()) > 60_000
    assert 17_000 < (tmp_path / "cut").stat().st_size <= 20_000
    small, full = NgramModel(cut), NgramModel(whole)
    agree = [small.successors((t,))[0][0] == full.successors((t,))[0][0] for t in range(300)]
    assert sum(agree) > 290, "the habits of single tokens survive"
    assert all(len(cut[f"keys.{n}"]) < len(whole[f"keys.{n}"]) for n in (2, 3))


def test_bytes_are_deterministic_and_survive_the_file(tmp_path: Path) -> None:
    sequences = corpus(2, 50, 70_000)  # wide tokens
    table = build_table(iter(sequences), order=4)
    save_table(table, tmp_path / "a")
    save_table(build_table(sequences, order=4), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    loaded = load_table(tmp_path / "a")
    assert set(loaded) == set(table) and all(np.array_equal(loaded[name], table[name]) for name in table)
    assert loaded["tokens.1"].dtype == np.uint32
    assert NgramModel(loaded).successors((5,)) == NgramModel(table).successors((5,))


def test_probabilities_are_laws() -> None:
    model = NgramModel(build_table(corpus(3, 100, 6), order=4))
    for context in [(), (1,), (2, 3), (5, 4, 3)]:
        assert sum(chance for _, chance in model.successors(context)) == pytest.approx(1.0, abs=0.08)
        assert len(model.successors(context)) <= SUCCESSORS


def test_hash_depends_on_tokens_and_order() -> None:
    keys = {extend_hash(extend_hash(0, a), b) >> 32 for a in range(200) for b in range(200)}
    assert len(keys) > 200 * 200 - 20 and all(0 <= key < 2**32 for key in keys)
    assert math.log2(max(keys)) > 31.9


@pytest.mark.parametrize("order, size", [(1, 8_000_000), (9, 8_000_000), (4, 100)])
def test_bounds_that_make_no_table_are_refused(order: int, size: int) -> None:
    with pytest.raises(TuneError, match="order"):
        build_table([([1], [2])], order, size)


def test_nothing_to_count_is_refused() -> None:
    with pytest.raises(TuneError, match="no answer tokens"):
        build_table([([1, 2, 3], [])])


def test_damaged_tables_are_refused_or_equal(tmp_path: Path) -> None:
    """Random flips and cuts: a typed error, or a table whose lookups still end."""
    path = tmp_path / "table"
    save_table(build_table(corpus(4, 20, 50)), path)
    good = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        bad = bytearray(good)
        if rng.random() < 0.3:
            del bad[rng.randrange(len(bad)) :]
        else:
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(bad))
        try:
            model = NgramModel(load_table(path))
        except ArtifactError as error:
            refused += 1
            assert "flexspec tune" in str(error) or "safetensors" in str(error)
        else:
            for context in [(), (1,), (1, 2), (1, 2, 3)]:
                model.successors(context)
    assert refused > 40


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("meta", np.array([2, 4]), "format 2"),
        ("meta", np.array([1, 40]), "order 40"),
        ("keys.1", np.array([5, 5], np.uint32), "level 1"),
        ("starts.2", np.zeros(0, np.uint32), "level 2"),
        ("probs.0", np.zeros((2, 2), np.uint8), "level 0"),
    ],
)
def test_inconsistent_arrays_are_named(name: str, value: np.ndarray, message: str) -> None:
    table = build_table(corpus(5, 5, 20)) | {name: value}
    with pytest.raises(ArtifactError, match=message):
        check_table(table, "table")

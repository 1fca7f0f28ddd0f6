"""Streams: keyed, repeatable, disjoint; drawing a token; the sampled child beside deterministic ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flexspec.runtime.acceptance.noise import DraftNoise, Purpose, RoundNoise, draft_child, draw_token, stream


def test_a_stream_is_a_function_of_its_key() -> None:
    keys = [(7, Purpose.ACCEPT, 3, 0), (8, Purpose.ACCEPT, 3, 0), (7, Purpose.SAMPLE, 3, 0)]
    keys += [(7, Purpose.ACCEPT, 4, 0), (7, Purpose.ACCEPT, 3, 1), (-7, Purpose.ACCEPT, 3, 0)]
    numbers = [tuple(stream(*key).random(4)) for key in keys]
    assert numbers == [tuple(stream(*key).random(4)) for key in keys]
    assert len(set(numbers)) == len(keys)


def test_streams_never_share_a_counter() -> None:
    """(key, counter) blocks read by 3 purposes x 2 lanes x 50 positions x 3 seeds, 40 numbers each."""
    blocks: set[tuple[int, ...]] = set()
    spans = 0
    for seed, purpose, lane, position in itertools.product((0, 1, 2**64 - 1), Purpose, (0, 1), range(50)):
        generator = stream(seed, purpose, position, lane)
        before = generator.bit_generator.state["state"]
        generator.random(40)
        after = generator.bit_generator.state["state"]
        first, last = int(before["counter"][0]), int(after["counter"][0])
        assert last - first == 10 and list(after["counter"][1:]) == list(before["counter"][1:])
        key = (*map(int, before["key"]), *map(int, before["counter"][1:]))
        blocks |= {(*key, counter) for counter in range(first, last)}
        spans += 10
    assert len(blocks) == spans


def test_purposes_keep_their_numbers() -> None:
    """What a seed means to a user: changing these changes every seeded output."""
    assert [(p.name, p.value) for p in Purpose] == [("DRAFT", 1), ("ACCEPT", 2), ("SAMPLE", 3)]
    assert stream(42, Purpose.SAMPLE, 5).random() == pytest.approx(0.8986620351805342, abs=1e-15)


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000])
def test_draw_token_inverts_the_cumulative_sum(size) -> None:
    rng = np.random.default_rng(size)
    law = rng.random(size) * (rng.random(size) < 0.3)
    law[rng.integers(size)] += 0.1
    law /= law.sum()
    last = int(np.flatnonzero(law)[-1])
    assert draw_token(law, 0.0) == int(np.flatnonzero(law)[0])
    assert draw_token(law, np.nextafter(1.0, 0.0)) == last
    edges = law.cumsum()
    for uniform in rng.random(300):
        token = draw_token(law, uniform)
        assert law[token] > 0.0
        assert edges[token] - law[token] - 1e-12 <= uniform <= edges[token] + 1e-12


def test_draw_token_never_leaves_the_support_at_the_edges() -> None:
    law = np.zeros(600)
    law[[3, 300]] = 0.1, 0.9
    for uniform in (0.0, 0.1, np.nextafter(0.1, 0), np.nextafter(0.1, 1), np.nextafter(1.0, 0), 1.0):
        assert draw_token(law, uniform) in (3, 300)


def test_a_token_is_drawn_by_its_own_position_in_every_round() -> None:
    law = np.full(50, 0.02)
    assert RoundNoise(3, 10).draw(law, 4) == RoundNoise(3, 14).draw(law, 0)
    assert [RoundNoise(3, at).draw(law, 0) for at in range(8)] != [RoundNoise(3, 1).draw(law, 0)] * 8


def test_draft_child_leaves_out_what_is_kept() -> None:
    q = np.array([0.5, 0.2, 0.2, 0.1])
    before = q.copy()
    drawn = [draft_child(q, [0, 3], DraftNoise(seed, 5), 0) for seed in range(200)]
    assert {child[0] for child in drawn if child} == {1, 2}
    assert all(child is not None and np.allclose(child[1], [0, 0.5, 0.5, 0]) for child in drawn)
    assert (q == before).all()
    assert draft_child(q, [0, 1, 2, 3], DraftNoise(1, 5), 0) is None

"""The SSM drafter on a table executor that refuses stale rows, wrong pages, positions, bits and features."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_ssm import Path, TableSsm, llm_feature, logits_after

from flexspec.draft_plan import Expansion
from flexspec.errors import CapacityError
from flexspec.runtime.acceptance.accept import check_exact
from flexspec.runtime.acceptance.noise import DraftNoise, draft_child
from flexspec.runtime.acceptance.transforms import target_law
from flexspec.runtime.drafters.base import DraftRequest
from flexspec.runtime.drafters.ssm import SsmDrafter
from flexspec.sampling import SamplingParams
from flexspec.tree import TokenTree

VOCAB = 40
KEEP = np.array([3, 5, 8, 9, 14, 17, 21, 22, 30, 31, 38, 39])
GREEDY = SamplingParams()


class Session:
    """Drives a drafter as an engine does, keeping each request's true text."""

    def __init__(self, ssm: TableSsm, drafter: SsmDrafter) -> None:
        self.ssm, self.drafter = ssm, drafter
        self.texts: dict[int, list[int]] = {}

    def begin(self, request: int, prompt: list[int], first: int, *, features_from: int = 0, piece: int = 7) -> None:
        self.drafter.begin(request, prompt)
        self.texts[request] = list(prompt)
        self.ssm.texts.append(self.texts[request])
        for start in range(features_from, len(prompt), piece):
            rows = [llm_feature(tuple(prompt[: i + 1])) for i in range(start, min(start + piece, len(prompt)))]
            self.drafter.observe_prompt(request, start, np.stack(rows) if self.drafter.reads_features else None)
        self.commit(request, [first])

    def commit(self, request: int, tokens: list[int]) -> None:
        text = self.texts[request]
        rows = [llm_feature(tuple(text + tokens[:i])) for i in range(len(tokens))]
        text.extend(tokens)
        self.drafter.observe(request, tokens, np.stack(rows) if self.drafter.reads_features else None)

    def propose(
        self, *requests: int, nodes: int = 255, depth: int = 64, params: SamplingParams = GREEDY
    ) -> list[TokenTree]:
        return self.drafter.propose(
            [DraftRequest(r, self.texts[r][-1], nodes, depth, params, params.seed or r) for r in requests]
        )


def make(
    expansion: Expansion, *, fused: bool = False, pages: int = 64, max_rows: int = 64, max_positions: int = 4096,
    sampled: str = "deterministic",
) -> Session:  # fmt: skip
    outputs = len(KEEP) if fused else VOCAB
    ssm = TableSsm(outputs, pages=pages, max_rows=max_rows, max_positions=max_positions, fused=fused)
    drafter = SsmDrafter(
        ssm, expansion, VOCAB, keep_ids=KEEP if fused else None, reads_features=fused, sampled=sampled
    )  # fmt: skip
    return Session(ssm, drafter)


def seen(session: Session, request: int) -> Path:
    """The path the SSM's root row stands for: a fused-state SSM never sees token 0."""
    return tuple(session.texts[request][1 if session.drafter.reads_features else 0 :])


def top(path: Path, k: int, fused: bool) -> list[tuple[int, float]]:
    """The k most likely tokens behind a path and their probabilities, written again from the definition."""
    logits = logits_after(path, len(KEEP) if fused else VOCAB).astype(np.float64)
    law = np.exp(logits - logits.max())
    law /= law.sum()
    order = sorted(range(len(law)), key=lambda i: (-law[i], i))[:k]
    return [(int(KEEP[i]) if fused else i, float(law[i])) for i in order]


def static_paths(root: Path, vector: tuple[int, ...], fused: bool) -> dict[Path, float]:
    """Every drafted path of the full static tree with its last node's score."""
    found: dict[Path, float] = {}
    level: list[Path] = [()]
    for k in vector:
        nexts: list[Path] = []
        for path in level:
            for token, chance in top(root + path, k, fused):
                found[(*path, token)] = chance
                nexts.append((*path, token))
        level = nexts
    return found


def paths_of(tree: TokenTree) -> dict[Path, float]:
    return {tuple(tree.tokens[node] for node in tree.path(i)[1:]): tree.scores[i] for i in range(1, len(tree))}


def assert_same(have: dict[Path, float], want: dict[Path, float]) -> None:
    assert set(have) == set(want)
    for path, score in want.items():
        assert have[path] == pytest.approx(score, rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("vector", [(1,), (3,), (1, 1, 1, 1), (1, 1, 3, 1, 1), (2, 2, 1), (4, 2, 1, 1)])
def test_static_tree_is_the_ssms_own(vector: tuple[int, ...], fused: bool) -> None:
    session = make(Expansion.static(vector), fused=fused)
    session.begin(1, list(range(10)), 11)
    (tree,) = session.propose(1)
    assert_same(paths_of(tree), static_paths(seen(session, 1), vector, fused))
    assert set(tree.sources[1:]) == {"ssm"} and tree.tokens[0] == 11 and not tree.laws


@pytest.mark.parametrize("fused", [False, True])
def test_one_row_a_step_while_the_tree_is_a_chain(fused: bool) -> None:
    session = make(Expansion.static((1, 1, 3, 1, 1)), fused=fused)
    session.begin(1, [1, 2, 3], 4)
    session.propose(1)
    assert session.ssm.fed[1:] == [1, 1, 3, 6], "the stem is context; only branching rows are fed again"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("vector", [(1, 1, 1, 1), (1, 2, 2, 1), (3, 2, 1)])
def test_commits_of_every_depth_across_page_edges(vector: tuple[int, ...], fused: bool) -> None:
    """After rejection at each depth and after full acceptance, at every offset of a page, the next tree is right."""
    session = make(Expansion.static(vector), fused=fused)
    session.begin(1, list(range(20)), 7)
    for round_ in range(60):
        (tree,) = session.propose(1)
        assert_same(paths_of(tree), static_paths(seen(session, 1), vector, fused))
        depth = round_ % (len(vector) + 1)
        nodes = [i for i, d in enumerate(tree.depths) if d == depth]
        accepted = [
            tree.tokens[i] for i in tree.path(nodes[-1 if round_ % 2 else 0])[1:]
        ]  # last sibling every 2nd time
        session.commit(1, [*accepted, (round_ * 5 + 1) % VOCAB])
    assert len(session.texts[1]) > 128


@pytest.mark.parametrize("fused", [False, True])
def test_dynamic_tree_keeps_the_most_likely_nodes(fused: bool) -> None:
    session = make(Expansion.dynamic(3, 4), fused=fused)
    session.begin(1, [1, 2, 3, 4, 5], 6)
    (tree,) = session.propose(1, nodes=12)
    root = seen(session, 1)
    survival: dict[Path, float] = {(): 1.0}
    level: list[Path] = [()]
    for children in (8, 4, 4):
        made: list[Path] = []
        for path in level:
            for token, chance in top(root + path, children, fused):
                survival[(*path, token)] = survival[path] * chance
                made.append((*path, token))
        level = sorted(made, key=lambda path: -survival[path])[:4]
    want = sorted((path for path in survival if path), key=lambda path: -survival[path])[:12]
    assert set(paths_of(tree)) == set(want) and len(tree) == 13


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_rows", [6, 7, 64])
def test_batched_equals_alone_whatever_the_row_limit(fused: bool, max_rows: int) -> None:
    vector = (2, 2, 1)
    prompts = {1: list(range(3)), 2: list(range(5, 30)), 3: [33], 4: list(range(2, 40))}
    together = make(Expansion.static(vector), fused=fused, max_rows=max_rows)
    for request, prompt in prompts.items():
        together.begin(request, prompt, 10 + request)
    for _ in range(4):
        trees = together.propose(*prompts)
        for request, tree in zip(prompts, trees, strict=True):
            assert_same(paths_of(tree), static_paths(seen(together, request), vector, fused))
            together.commit(request, [tree.tokens[1], 20 + request])
    assert max(together.ssm.fed) <= max_rows


@settings(max_examples=30)
@given(st.data())
def test_any_history_leaves_a_consistent_cache_and_no_page(data: st.DataObject) -> None:
    fused = data.draw(st.booleans())
    vector = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    session = make(Expansion.static(vector), fused=fused, pages=9, max_rows=48)
    alive: list[int] = []
    number = 0
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["begin", "round", "round", "round", "end"]))
        if action == "begin":
            number += 1
            session.begin(number, [number % VOCAB, *range(data.draw(st.integers(0, 60)) % VOCAB)], 4)
            alive.append(number)
        elif action == "end" and alive:
            request = alive.pop(data.draw(st.integers(0, len(alive) - 1)))
            session.drafter.end(request)
            session.texts.pop(request)
        elif alive:
            for request, tree in zip(alive, session.propose(*alive), strict=True):
                if len(tree) > 1:
                    assert_same(paths_of(tree), static_paths(seen(session, request), vector, fused))
                node = data.draw(st.integers(0, len(tree) - 1))
                accepted = [tree.tokens[i] for i in tree.path(node)[1:]]
                session.commit(request, [*accepted, data.draw(st.integers(0, VOCAB - 1))])
    for request in alive:
        session.drafter.end(request)
    assert session.drafter.free_pages == 9


def test_proposing_twice_gives_the_same_tree() -> None:
    for fused in (False, True):
        session = make(Expansion.static((2, 1)), fused=fused)
        session.begin(1, [1, 2, 3], 4)
        first, second = session.propose(1)[0], session.propose(1)[0]
        assert (first.tokens, first.parents) == (second.tokens, second.parents)


def test_missing_features_shorten_the_context_and_do_no_harm() -> None:
    session = make(Expansion.static((2, 2)), fused=True)
    session.begin(1, list(range(30)), 5, features_from=12)  # a prefix-cache hit: no features of rows 0 .. 11
    (tree,) = session.propose(1)
    assert_same(paths_of(tree), static_paths(tuple(session.texts[1][13:]), (2, 2), True))
    session.texts[1].extend([6, 7])
    session.drafter.observe(1, [6, 7], None)  # a commit without features: nothing to draft from
    assert len(session.propose(1)[0]) == 1
    session.commit(1, [8])
    (tree,) = session.propose(1)
    assert_same(paths_of(tree), static_paths((8,), (2, 2), True))


def test_drafting_stops_at_the_last_position_and_gives_its_pages_back() -> None:
    session = make(Expansion.static((1, 1, 1)), max_positions=40)
    session.begin(1, list(range(34)), 1)
    depths = []
    for token in range(10):
        depths.append(len(session.propose(1)[0]) - 1)
        session.commit(1, [token])
    assert depths == [3, 3, 3, 3, 2, 1, 0, 0, 0, 0]
    assert session.drafter.free_pages == 64 and session.drafter.counts["skipped_out_of_positions"] == 1


def test_a_full_pool_skips_requests_until_pages_are_free() -> None:
    session = make(Expansion.static((2, 1)), pages=2)
    session.begin(1, list(range(32)), 1)
    session.begin(2, list(range(5, 39)), 2)
    first, second = session.propose(1, 2)
    assert len(first) == 5 and len(second) == 1 and session.drafter.counts["skipped_pool_full"] == 1
    session.commit(2, [9])
    session.drafter.end(1)
    (tree,) = session.propose(2)
    assert_same(paths_of(tree), static_paths(seen(session, 2), (2, 1), False))


def test_limits_of_a_request_hold() -> None:
    session = make(Expansion.static((3, 2, 1)))
    session.begin(1, [1, 2], 3)
    full = paths_of(session.propose(1)[0])
    assert len(session.propose(1, nodes=4)[0]) == 5
    assert max(session.propose(1, depth=2)[0].depths) == 2
    assert len(session.propose(1, nodes=0)[0]) == len(session.propose(1, depth=0)[0]) == 1
    assert_same(paths_of(session.propose(1)[0]), full)


def test_a_diverged_ssm_drafts_nothing() -> None:
    session = make(Expansion.static((2, 1)))
    session.begin(1, [1, 2], 3)
    session.ssm.poison = True
    assert len(session.propose(1)[0]) == 1 and session.drafter.counts["skipped_not_finite"] == 1


def test_unknown_and_ended_requests_are_harmless() -> None:
    session = make(Expansion.static((2,)))
    session.drafter.observe(9, [1], None)
    session.drafter.end(9)
    session.begin(1, [1], 2)
    session.drafter.end(1)
    trees = session.drafter.propose([DraftRequest(9, 5, 8, 8, GREEDY), DraftRequest(1, 2, 8, 8, GREEDY)])
    assert [tree.tokens for tree in trees] == [(5,), (2,)] and session.drafter.propose([]) == []


@pytest.mark.parametrize("fused", [False, True])
def test_mixed_children_are_drawn_from_the_stated_law(fused: bool) -> None:
    params = SamplingParams(temperature=0.9, top_k=6, seed=3)
    session = make(Expansion.static((3, 2)), fused=fused, sampled="mixed")
    session.begin(1, [1, 2, 3], 4)
    (tree,) = session.propose(1, params=params)
    assert len(tree) == 1 + 3 + 6 and len(tree.laws) == 1 + 3, "one drawn child a node"
    check_exact(tree, VOCAB, "traversal")
    noise = DraftNoise(3, len(session.texts[1]))
    for parent, children in enumerate(tree.children()):
        if not children:
            continue
        path = seen(session, 1) + tuple(tree.tokens[i] for i in tree.path(parent)[1:])
        kept = [tree.tokens[i] for i in children if i not in tree.laws]
        assert kept == [token for token, _ in top(path, len(children) - 1, fused)]
        law = np.zeros(VOCAB)
        logits = logits_after(path, len(KEEP) if fused else VOCAB)
        law[KEEP if fused else np.arange(VOCAB)] = target_law(logits, params)
        drawn = draft_child(law, kept, noise, tree.depths[parent])
        assert drawn is not None
        (node,) = [i for i in children if i in tree.laws]
        assert tree.tokens[node] == drawn[0] and np.array_equal(tree.laws[node], drawn[1])


def test_mixed_trees_are_sized_before_they_are_drawn() -> None:
    session = make(Expansion.static((2, 2, 2)), sampled="mixed")
    session.begin(1, [1, 2, 3], 4)
    sampled = SamplingParams(temperature=1.0, seed=1)
    assert len(session.propose(1, nodes=13, params=sampled)[0]) == 7, "the third level does not fit whole"
    assert len(session.propose(1, nodes=1, params=sampled)[0]) == 1
    assert not session.propose(1)[0].laws, "greedy requests get deterministic children"


def test_what_cannot_run_is_refused_at_the_start() -> None:
    with pytest.raises(CapacityError, match="rows a step"):
        make(Expansion.static((8, 8, 1)), max_rows=64)
    with pytest.raises(CapacityError, match="outputs"):
        SsmDrafter(TableSsm(VOCAB), Expansion.static((1,)), VOCAB, keep_ids=KEEP)

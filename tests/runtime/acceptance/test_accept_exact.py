"""Exactness of the acceptance rules by full enumeration: every draft, every decision, joint law of the output.

Target and draft are random tables keyed by prefix. One run drafts a tree and accepts it; ``outcomes`` takes every
branch of every random decision and weighs it. The mutants at the end are faults seen in public engines: the same
harness must see each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from flexspec.runtime.acceptance.accept import RULES, check_exact
from flexspec.runtime.acceptance.noise import draft_child
from flexspec.runtime.acceptance.transforms import target_law
from flexspec.sampling import SamplingParams
from flexspec.tree import TokenTree

Prefix = tuple[int, ...]


pytestmark = pytest.mark.slow(reason="enumerates every draw")


class Branches:
    """Decisions that follow a script and, behind its end, take the first branch of positive probability."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script = script
        self.taken: list[int] = []
        self.untaken: list[list[int]] = []
        self.probability = 1.0

    def _decide(self, law: np.ndarray) -> int:
        at = len(self.taken)
        possible = [int(i) for i in np.flatnonzero(law)]
        choice = self.script[at] if at < len(self.script) else possible[0]
        self.taken.append(choice)
        self.untaken.append([] if at < len(self.script) else possible[1:])
        self.probability *= float(law[choice])
        return choice

    def accepts(self, chance: float) -> bool:
        assert 0.0 <= chance <= 1.0 + 1e-12
        return self._decide(np.array([max(0.0, 1.0 - chance), chance])) == 1

    def draw(self, law_V: np.ndarray, depth: int) -> int:
        return self._decide(law_V / law_V.sum())  # as noise.draw_token does


def outcomes(run: Callable[[Branches], Prefix]) -> Iterator[tuple[float, Prefix]]:
    """(probability, result) of every way ``run`` can go."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        branches = Branches(scripts.pop())
        result = run(branches)
        yield branches.probability, result
        for at in range(len(branches.script), len(branches.taken)):
            scripts += [(*branches.taken[:at], other) for other in branches.untaken[at]]


@dataclass
class World:
    """A target and a draft model as tables: prefix -> logits, drawn once, and the laws they mean."""

    seed: int
    V: int
    params: SamplingParams
    draft_params: SamplingParams = SamplingParams(temperature=1.3)
    tables: dict[tuple[str, Prefix], np.ndarray] = field(default_factory=dict)

    def law(self, model: str, prefix: Prefix) -> np.ndarray:
        if (model, prefix) not in self.tables:
            rng = np.random.default_rng([self.seed, model == "target", len(prefix), *prefix])
            logits = rng.normal(0.0, 1.5, self.V).astype(np.float32)
            self.tables[model, prefix] = target_law(logits, self.params if model == "target" else self.draft_params)
        return self.tables[model, prefix]

    def joint(self, length: int) -> np.ndarray:
        """The target's own law of ``length`` tokens, [V] * length."""
        law = np.zeros((self.V,) * length)
        for seq in itertools.product(range(self.V), repeat=length):
            law[seq] = np.prod([self.law("target", seq[:i])[seq[i]] for i in range(length)])
        return law


Children = Callable[[World, Prefix, int, Branches], list[tuple[int, np.ndarray | None]]]


def iid(world: World, prefix: Prefix, width: int, noise: Branches) -> list[tuple[int, np.ndarray | None]]:
    q = world.law("draft", prefix)
    return [(noise.draw(q, len(prefix)), q) for _ in range(width)]


def without_replacement(world: World, prefix: Prefix, width: int, noise: Branches) -> list:
    children: list[tuple[int, np.ndarray | None]] = []
    for _ in range(width):
        child = draft_child(world.law("draft", prefix), [token for token, _ in children], noise, len(prefix))
        if child:
            children.append(child)
    return children


def mixed(world: World, prefix: Prefix, width: int, noise: Branches) -> list:
    """width - 1 likeliest tokens, listed before the sampled child, which traversal must try first all the same."""
    q = world.law("draft", prefix)
    kept = [int(token) for token in np.argsort(-q, kind="stable")[: width - 1]]
    child = draft_child(q, kept, noise, len(prefix))
    return [(token, None) for token in kept] + ([child] if child else [])


def likeliest(world: World, prefix: Prefix, width: int, noise: Branches) -> list:
    q = world.law("draft", prefix)
    return [(int(token), None) for token in np.argsort(-q, kind="stable")[:width]]


def draft(world: World, widths: Prefix, children: Children, noise: Branches) -> TokenTree:
    """Level by level; the root's token is never looked at, prefixes hold what comes behind it."""
    tokens, parents, prefixes, level = [0], [-1], [()], [0]
    laws: dict[int, np.ndarray] = {}
    for width in widths:
        below = []
        for node in level:
            for token, law in children(world, prefixes[node], width, noise):
                if law is not None:
                    laws[len(tokens)] = law
                below.append(len(tokens))
                tokens.append(token)
                parents.append(node)
                prefixes.append((*prefixes[node], token))
        level = below
    return TokenTree(tuple(tokens), tuple(parents), laws=laws)


def target_rows(world: World, tree: TokenTree) -> Callable[[int], np.ndarray]:
    return lambda node: world.law("target", tuple(tree.tokens[at] for at in tree.path(node)[1:]))


def round_law(world: World, widths: Prefix, children: Children, method: str, rows=target_rows, check: bool = True):
    """(joint law of the first depth + 1 tokens, expected accepted tokens): a round, then the target by itself."""
    length = len(widths) + 1
    law, accepted = np.zeros((world.V,) * length), 0.0

    def run(noise: Branches) -> Prefix:
        tree = draft(world, widths, children, noise)
        if check:
            check_exact(tree, world.V, method)
        return tuple(RULES[method](tree, rows(world, tree), noise).tokens(tree))

    for probability, output in outcomes(run):
        accepted += probability * (len(output) - 1)
        for tail in itertools.product(range(world.V), repeat=length - len(output)):
            seq = output + tail
            rest = np.prod([world.law("target", seq[:i])[seq[i]] for i in range(len(output), length)])
            law[seq] += probability * rest
    return law, accepted


def error(world: World, *args, **kwargs) -> float:
    law, _ = round_law(world, *args, **kwargs)
    return float(np.abs(law - world.joint(law.ndim)).sum() / 2)  # total variation


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_k=3),
    SamplingParams(temperature=0.8, top_p=0.8),
    SamplingParams(temperature=1.4, min_p=0.3),
    SamplingParams(temperature=1.0, top_k=3, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=0.0),
]
SHORT_DRAFT = SamplingParams(temperature=1.2, top_k=2)  # laws with zeros, and few enough drafts for wide trees
CASES = [
    ("match", likeliest, 5, (1, 1)), ("match", likeliest, 5, (3, 2)), ("match", likeliest, 4, (2, 2, 1)),
    ("match", iid, 4, (2, 1)), ("match", mixed, 3, (2, 2)),
    ("mss", iid, 5, (1, 1)), ("mss", iid, 4, (2, 1)), ("mss", iid, 2, (2, 2)), ("mss", without_replacement, 3, (2, 2)),
    ("traversal", iid, 5, (1, 1)), ("traversal", iid, 3, (2, 1)), ("traversal", iid, 3, (1, 1, 1)),
    ("traversal", without_replacement, 4, (2, 1)),
    ("traversal", mixed, 5, (2, 1)), ("traversal", mixed, 4, (2, 2)), ("traversal", mixed, 4, (3, 2)),
    ("traversal", mixed, 3, (2, 1, 2)), ("traversal", likeliest, 4, (3, 2)), ("traversal", likeliest, 4, (2, 2, 1)),
]  # fmt: skip


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize(("method", "children", "V", "widths"), CASES)
def test_joint_law_is_the_targets(method, children, V, widths, params) -> None:
    assert error(World(1, V, params), widths, children, method) < 1e-12


@pytest.mark.parametrize(
    ("method", "widths"), [("mss", (2, 2)), ("mss", (3, 2)), ("traversal", (2, 2)), ("traversal", (2, 1, 1))]
)
def test_draft_laws_with_zeros(method, widths) -> None:
    world = World(2, 3, SamplingParams(temperature=1.0), SHORT_DRAFT)
    assert error(world, widths, iid, method) < 1e-12


def irregular(world: World, prefix: Prefix, width: int, noise: Branches) -> list:
    """0 to 2 fixed children and 0 to 2 sampled without replacement; the prefix alone decides how many."""
    rng = np.random.default_rng([world.seed, 99, *prefix])
    kept = [int(token) for token in rng.permutation(world.V)[: rng.integers(0, 3)]]
    children: list = []
    for _ in range(rng.integers(0, 3)):
        child = draft_child(world.law("draft", prefix), kept + [token for token, _ in children], noise, 0)
        children += [child] if child else []
    return [(token, None) for token in kept] + children


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("method", ["match", "traversal"])
def test_irregular_mixed_trees(seed, method) -> None:
    world = World(seed, 4, PARAMS[seed % 5], SamplingParams(temperature=1.0, top_k=3))
    assert error(world, (1, 1), irregular, method) < 1e-12


def test_self_draft_is_accepted_whole() -> None:
    """Draft equal to target: at any temperature a sampled chain is accepted to its end (omlx#3370 had 0 % above 0)."""
    params = SamplingParams(temperature=0.7)
    world = World(3, 4, params)
    own = lambda w, prefix, width, noise: [(noise.draw(w.law("target", prefix), 0), w.law("target", prefix))]  # noqa: E731
    for method in ("mss", "traversal"):
        law, accepted = round_law(world, (1, 1, 1), own, method)
        assert accepted == pytest.approx(3.0, abs=1e-12)
        assert np.abs(law - world.joint(4)).max() < 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_traversal_accepts_no_less_than_token_level_on_a_chain(seed) -> None:
    world = World(seed, 4, SamplingParams(temperature=1.0))
    best, plain = (round_law(world, (1, 1, 1), iid, method)[1] for method in ("traversal", "mss"))
    assert best >= plain - 1e-12
    assert best > plain + 1e-4 or seed != 0  # and the gain is real somewhere


@pytest.mark.parametrize("seed", range(3))
def test_match_is_the_best_rule_for_deterministic_drafts(seed) -> None:
    """It accepts each node as often as the LLM goes there, the bound of every exact rule."""
    world = World(seed, 4, SamplingParams(temperature=1.0))
    tree = draft(world, (3, 2), likeliest, Branches(()))
    paths = [tuple(tree.tokens[at] for at in tree.path(node)[1:]) for node in range(1, len(tree))]
    bound = sum(np.prod([world.law("target", path[:i])[path[i]] for i in range(len(path))]) for path in paths)
    assert round_law(world, (3, 2), likeliest, "match")[1] == pytest.approx(bound, abs=1e-12)
    assert round_law(world, (3, 2), likeliest, "traversal")[1] <= bound + 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_mixed_children_reach_the_closed_form_optimum(seed) -> None:
    """One level: p(S) + sum over the rest of min(p, q'), and more than i.i.d. children get from MSS."""
    world = World(seed, 5, SamplingParams(temperature=1.0))
    p, q = world.law("target", ()), world.law("draft", ())
    kept = np.argsort(-q, kind="stable")[:2]
    rest = q.copy()
    rest[kept] = 0.0
    optimum = p[kept].sum() + np.minimum(p, rest / rest.sum())[rest > 0].sum()
    accepted = round_law(world, (3,), mixed, "traversal")[1]
    assert accepted == pytest.approx(optimum, abs=1e-12)
    assert accepted > round_law(world, (3,), iid, "mss")[1]


# Faults that look harmless. Each must show as a total variation far above rounding.


def dropped_draw(world, prefix, width, noise):
    return [(token, law) for token, law in iid(world, prefix, width, noise) if law[token] > 0.3]


def likelier_of_two(world, prefix, width, noise):
    q = world.law("draft", prefix)
    return [(max((noise.draw(q, 0), noise.draw(q, 0)), key=lambda token: q[token]), q)]


def law_of_another_temperature(world, prefix, width, noise):
    q = world.law("draft", prefix)
    return [(token, q**2 / (q**2).sum()) for token, _ in iid(world, prefix, width, noise)]


def law_before_replacement(world, prefix, width, noise):
    return [(token, world.law("draft", prefix)) for token, _ in without_replacement(world, prefix, width, noise)]


@pytest.mark.parametrize("method", ["mss", "traversal"])
@pytest.mark.parametrize(
    ("children", "widths"),
    [
        (dropped_draw, (1, 1)), (likelier_of_two, (1, 1)), (law_of_another_temperature, (1, 1)),
        (law_before_replacement, (2,)),
    ],
)  # fmt: skip
def test_faulty_drafting_is_seen(children, widths, method) -> None:
    assert error(World(4, 4, SamplingParams(temperature=1.0)), widths, children, method) > 3e-3
    assert error(World(4, 4, SamplingParams(temperature=1.0)), widths, children, "match") < 1e-12


def law_forgotten(world, prefix, width, noise):
    return [(token, None) for token, _ in iid(world, prefix, width, noise)]


def test_a_forgotten_law_costs_acceptance_only() -> None:
    """One-hot laws are exact for each tree by itself, so for drawn trees as well."""
    world = World(4, 4, SamplingParams(temperature=1.0))
    law, accepted = round_law(world, (1, 1), law_forgotten, "traversal")
    assert np.abs(law - world.joint(3)).max() < 1e-12
    assert accepted < round_law(world, (1, 1), iid, "traversal")[1] - 0.1


def stopped_after_keeping(world, prefix, width, noise):
    """Stop drafting below an unlikely token, but keep the token: harmless."""
    unlikely = prefix and world.law("draft", prefix[:-1])[prefix[-1]] < 0.3
    return [] if unlikely else iid(world, prefix, width, noise)


@pytest.mark.parametrize("method", ["mss", "traversal"])
def test_stopping_after_a_kept_token_stays_exact(method) -> None:
    assert error(World(4, 4, SamplingParams(temperature=1.0)), (1, 1, 1), stopped_after_keeping, method) < 1e-12


def parents_row(world, tree):
    rows = target_rows(world, tree)
    return lambda node: rows(max(tree.parents[node], 0))


def hotter(world, tree):
    other = World(world.seed, world.V, SamplingParams(temperature=1.5))
    return target_rows(other, tree)


def only_the_bonus_sampled(world, tree):
    rows = target_rows(world, tree)
    with_children = set(tree.parents)
    return lambda node: np.eye(world.V)[rows(node).argmax()] if node in with_children else rows(node)


@pytest.mark.parametrize("rows", [parents_row, hotter, only_the_bonus_sampled])
@pytest.mark.parametrize(("method", "children"), [("match", likeliest), ("mss", iid), ("traversal", mixed)])
def test_faulty_target_rows_are_seen(rows, method, children) -> None:
    assert error(World(5, 4, SamplingParams(temperature=1.0)), (2, 1), children, method, rows=rows) > 3e-3


def masked_only(world, tree):
    full = World(world.seed, world.V, SamplingParams(temperature=world.params.temperature))
    rows, full_rows = target_rows(world, tree), target_rows(full, tree)
    return lambda node: np.where(rows(node) > 0.0, full_rows(node), 0.0)


@pytest.mark.parametrize("method", ["mss", "traversal"])
def test_a_nucleus_without_renormalising_is_seen(method) -> None:
    world = World(4, 4, SamplingParams(temperature=1.0, top_p=0.8))
    assert error(world, (1, 1), iid, method, rows=masked_only) > 3e-3

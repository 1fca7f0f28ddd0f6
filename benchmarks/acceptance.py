"""Acceptance rules side by side: accepted tokens per round on synthetic models, and the cost of a call.

Models are random: logits of a prefix are normal with deviation 2.5, the draft's are the target's plus noise of
deviation 1.2, over a small vocabulary. This ranks the rules; real pairs are more peaked. Run:

    python benchmarks/acceptance.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from flexspec.runtime.acceptance.accept import Method, accept_sampled
from flexspec.runtime.acceptance.noise import DraftNoise, draft_child, draw_token
from flexspec.runtime.acceptance.transforms import target_law
from flexspec.sampling import SamplingParams
from flexspec.tree import TokenTree

Logits = NDArray[np.float32]
Child = tuple[int, NDArray[np.float64] | None]
Children = Callable[[NDArray[np.float64], int, DraftNoise], list[Child]]
TREES = {"1,1,1,1": (1, 1, 1, 1), "4,2,1": (4, 2, 1), "2,2,1,1": (2, 2, 1, 1)}


def iid(q: NDArray[np.float64], width: int, noise: DraftNoise) -> list[Child]:
    return [(noise.draw(q, 0), q) for _ in range(width)]


def without_replacement(q: NDArray[np.float64], width: int, noise: DraftNoise) -> list[Child]:
    children: list[Child] = []
    for _ in range(width):
        child = draft_child(q, [token for token, _ in children], noise, 0)
        children += [child] if child else []
    return children


def likeliest(q: NDArray[np.float64], width: int, noise: DraftNoise) -> list[Child]:
    return [(int(token), None) for token in np.argsort(-q, kind="stable")[:width]]


def mixed(q: NDArray[np.float64], width: int, noise: DraftNoise) -> list[Child]:
    deterministic = likeliest(q, width - 1, noise)
    child = draft_child(q, [token for token, _ in deterministic], noise, 0)
    return deterministic + ([child] if child else [])


RULES: list[tuple[str, Children, Method]] = [
    ("match, likeliest", likeliest, "match"),
    ("match, sampled", iid, "match"),
    ("mss, i.i.d.", iid, "mss"),
    ("mss, without replacement", without_replacement, "mss"),
    ("traversal, i.i.d.", iid, "traversal"),
    ("traversal, mixed", mixed, "traversal"),
]


def draft(
    widths: tuple[int, ...], children: Children, vocab: int, seed: int, params: SamplingParams, peak: float = 0.0
) -> tuple[TokenTree, Logits]:
    """A tree and the target's logits at its nodes; a node's logits depend only on its path."""
    noise = DraftNoise(seed, 1)
    tokens, parents, level = [0], [-1], [0]
    paths: list[tuple[int, ...]] = [(0,)]
    laws: dict[int, NDArray[np.float64]] = {}
    rows = [_logits(seed, (0,), vocab, peak)]
    for width in widths:
        below = []
        for node in level:
            distorted = rows[node][1]
            for token, law in children(target_law(distorted, params), width, noise):
                if law is not None:
                    laws[len(tokens)] = law
                below.append(len(tokens))
                tokens.append(token)
                parents.append(node)
                paths.append((*paths[node], token))
                rows.append(_logits(seed, paths[-1], vocab, peak))
        level = below
    return TokenTree(tuple(tokens), tuple(parents), laws=laws), np.stack([target for target, _ in rows])


def _logits(seed: int, path: tuple[int, ...], vocab: int, peak: float) -> tuple[Logits, Logits]:
    """(target, draft) logits after a path; ``peak`` raises twenty tokens by up to that much."""
    rng = np.random.default_rng([seed, *path])
    target = rng.normal(0.0, 2.5, vocab)
    target[rng.integers(0, vocab, 20)] += np.linspace(peak, peak / 3, 20)
    return target.astype(np.float32), (target + rng.normal(0.0, 1.2, vocab)).astype(np.float32)


def accepted_table(rounds: int, vocab: int) -> None:
    print(f"accepted draft tokens a round, vocabulary {vocab}, {rounds} rounds (standard error in brackets)")
    for name, widths in TREES.items():
        for temperature in (0.3, 0.7, 1.0):
            params = SamplingParams(temperature=temperature)
            print(f"tree {name}  T={temperature}")
            for label, children, method in RULES:
                counts = []
                for seed in range(rounds):
                    tree, logits_TV = draft(widths, children, vocab, seed, params)
                    counts.append(len(accept_sampled(tree, logits_TV, params, seed, 1, method).nodes) - 1)
                print(f"  {label:26s} {np.mean(counts):.2f} ({np.std(counts) / rounds**0.5:.2f})")


def cost_table(vocab: int) -> None:
    print(f"processor time of a call in us (best of 9 passes), vocabulary {vocab}; acceptance on tree 4,2,1")
    print(f"  {'':26s} {'rows':8s} {'T=0.8':>7s} {'top_p':>7s} {'top_k':>7s}")
    every = [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(temperature=0.8, top_k=50),
    ]
    for rows, peak in (("peaked", 15.0), ("flat", 0.0)):
        row_V = _logits(1, (0,), vocab, peak)[0]
        costs = [_best_us([partial(target_law, row_V, params)] * 20) for params in every]
        _print_costs("a law", rows, costs)
        _print_costs("a draw", rows, [_best_us([partial(draw_token, target_law(row_V, p), 0.6)] * 20) for p in every])
        for label, children, method in RULES:
            costs = []
            for params in every:
                calls = []
                for seed in range(20):
                    tree, logits_TV = draft((4, 2, 1), children, vocab, seed, params, peak)
                    calls.append(partial(accept_sampled, tree, logits_TV, params, seed, 1, method))
                costs.append(_best_us(calls))
            _print_costs(label, rows, costs)


def _print_costs(label: str, rows: str, costs_us: list[float]) -> None:
    print(f"  {label:26s} {rows:8s} " + " ".join(f"{cost:7.0f}" for cost in costs_us))


def _best_us(calls: Sequence[Callable[[], object]], repeats: int = 9) -> float:
    """Mean processor time of the calls in the best of some repeats; other load on the machine counts little."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        for call in calls:
            call()
        best = min(best, (time.process_time() - start) / len(calls) * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400, help="rounds per cell; 0 leaves the table out")
    parser.add_argument("--vocab", type=int, default=200, help="vocabulary of the accepted-token table")
    parser.add_argument("--cost-vocab", type=int, default=49152, help="vocabulary of the cost table")
    args = parser.parse_args()
    if args.rounds:
        accepted_table(args.rounds, args.vocab)
    cost_table(args.cost_vocab)


if __name__ == "__main__":
    main()

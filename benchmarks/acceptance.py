"""Acceptance rules side by side: accepted tokens a round on synthetic models, and what a call costs.

Models are random: logits of a prefix are normal with deviation 2.5, the draft's are the target's plus noise of
deviation 1.2, over a small vocabulary. It orders the rules; real pairs are more peaked. Run:

    python benchmarks/acceptance.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flexspec.runtime.noise import DraftNoise, draft_child
from flexspec.runtime.transforms import target_law
from flexspec.runtime.verify import Method, accept_sampled
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
    kept = likeliest(q, width - 1, noise)
    child = draft_child(q, [token for token, _ in kept], noise, 0)
    return kept + ([child] if child else [])


RULES: list[tuple[str, Children, Method]] = [
    ("match, likeliest", likeliest, "match"),
    ("match, sampled", iid, "match"),
    ("mss, i.i.d.", iid, "mss"),
    ("mss, without replacement", without_replacement, "mss"),
    ("traversal, i.i.d.", iid, "traversal"),
    ("traversal, mixed", mixed, "traversal"),
]


def draft(
    widths: tuple[int, ...], children: Children, vocab: int, seed: int, params: SamplingParams
) -> tuple[TokenTree, Logits]:
    """A tree and the target's logits at its nodes; a node's logits depend on its path alone."""
    noise = DraftNoise(seed, 1)
    tokens, parents, level = [0], [-1], [0]
    paths: list[tuple[int, ...]] = [(0,)]
    laws: dict[int, NDArray[np.float64]] = {}
    rows = [_logits(seed, (0,), vocab)]
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
                rows.append(_logits(seed, paths[-1], vocab))
        level = below
    return TokenTree(tuple(tokens), tuple(parents), laws=laws), np.stack([target for target, _ in rows])


def _logits(seed: int, path: tuple[int, ...], vocab: int) -> tuple[Logits, Logits]:
    """(target, draft) logits behind a path."""
    rng = np.random.default_rng([seed, *path])
    target = rng.normal(0.0, 2.5, vocab)
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
    print(f"cost of one call, vocabulary {vocab}, tree 4,2,1 (best of 5 x 20 rounds)")
    for label, children, method in RULES:
        for params in (SamplingParams(temperature=0.8), SamplingParams(temperature=0.8, top_p=0.95)):
            rounds = [draft((4, 2, 1), children, vocab, seed, params) for seed in range(20)]
            best_us = float("inf")
            for _ in range(5):
                start = time.perf_counter()
                for seed, (tree, logits_TV) in enumerate(rounds):
                    accept_sampled(tree, logits_TV, params, seed, 1, method)
                best_us = min(best_us, (time.perf_counter() - start) / len(rounds) * 1e6)
            print(f"  {label:26s} top_p={params.top_p:<5} {best_us:6.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--vocab", type=int, default=200, help="vocabulary of the accepted-token table")
    parser.add_argument("--cost-vocab", type=int, default=49152, help="vocabulary of the cost table")
    args = parser.parse_args()
    accepted_table(args.rounds, args.vocab)
    cost_table(args.cost_vocab)


if __name__ == "__main__":
    main()

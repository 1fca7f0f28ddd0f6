"""The whole drafting side of a round: real sources together, limits, learning, and text that never changes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest
from table_ssm import TableSsm, logits_after

from flexspec.compiler.artifact.ngram_table import build_table
from flexspec.draft_plan import DraftLadder, DraftPlan
from flexspec.runtime.acceptance.accept import accept_greedy
from flexspec.runtime.drafters.base import Drafter, DraftRequest
from flexspec.runtime.drafters.budget import StepCost
from flexspec.runtime.drafters.ngram import NgramDrafter, NgramModel
from flexspec.runtime.drafters.planned import PlannedDrafter
from flexspec.runtime.drafters.ssm import SsmDrafter
from flexspec.runtime.drafters.suffix import SuffixDrafter
from flexspec.runtime.executors.step import StepBatch, StepResult
from flexspec.sampling import SamplingParams

VOCAB = 16
PLANS = [
    "off",
    "chain:5",
    "chain:3/sources=ssm",
    "tree:2,2,1",
    "tree:1,2/sources=ssm+suffix/nodes=12",
    "tree:2,1/sources=ssm+ssm2",
    "budget:12/sources=suffix+ngram",
    "budget:20/ssm_depth=3/sources=suffix+ngram+ssm",
]


class OtherSsm(TableSsm):
    """A second SSM with other opinions: the same logits, rolled by one token."""

    def step(self, batch: StepBatch, *, want_logits: bool, want_features: bool = True) -> StepResult:
        result = super().step(batch, want_logits=want_logits, want_features=want_features)
        assert result.logits_LV is not None
        return StepResult(result.argmax_L, np.roll(result.logits_LV, 1, axis=1), None)


def llm_next(text: list[int]) -> int:
    """A made-up LLM: usually a habit of the last two tokens, sometimes what the SSM's table would say."""
    if sum(text[-3:]) % 5 == 0:
        return int(logits_after(tuple(text), VOCAB).argmax())
    return (3 * text[-1] + text[-2]) % VOCAB


def answer(prompt: list[int], tokens: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + tokens:
        text.append(llm_next(text))
    return text


def planned(
    text: str, step_cost: StepCost | None = None, clock: Callable[[], float] = time.perf_counter
) -> PlannedDrafter:
    plan = DraftPlan.parse(text)
    table = build_table([([a, b], answer([a, b], 30)[2:]) for a in range(3) for b in range(3)])
    drafters: list[Drafter] = [
        SuffixDrafter(),
        NgramDrafter(NgramModel(table)),
        SsmDrafter(TableSsm(VOCAB), plan.expansion, VOCAB, sampled=plan.sampled),
        SsmDrafter(OtherSsm(VOCAB), plan.expansion, VOCAB, name="ssm2"),
    ]
    return PlannedDrafter(DraftLadder.of(plan), drafters, step_cost, clock)


def serve(drafter: PlannedDrafter, prompts: dict[int, list[int]], tokens: int) -> tuple[dict[int, list[int]], int]:
    """Greedy rounds for all requests until each has ``tokens`` new ones: their texts and the number of rounds."""
    texts = {request: list(prompt) for request, prompt in prompts.items()}
    for request, prompt in prompts.items():
        drafter.begin(request, prompt)
        texts[request].append(llm_next(prompt))
        drafter.observe(request, texts[request][-1:], None)
    rounds = 0
    limits = drafter.limits
    while min(len(texts[r]) - len(prompts[r]) for r in texts) < tokens:
        rounds += 1
        ask = [DraftRequest(r, text[-1], 64, 64, SamplingParams()) for r, text in texts.items()]
        for request, tree in zip(list(texts), drafter.propose(ask), strict=True):
            text = texts[request]
            assert tree.tokens[0] == text[-1]
            assert len(tree) - 1 <= limits.max_nodes and max(tree.depths) <= limits.max_depth
            argmax = [llm_next(text + [tree.tokens[n] for n in tree.path(i)[1:]]) for i in range(len(tree))]
            accepted = accept_greedy(tree, np.array(argmax, np.int32))
            drafter.record(tree, accepted.nodes)
            new = accepted.tokens(tree)
            text.extend(new)
            drafter.observe(request, new, None)
    for request in prompts:
        drafter.end(request)
    return texts, rounds


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_gives_the_llms_own_text_in_fewer_rounds(plan: str) -> None:
    prompts = {1: [1, 2], 2: [5, 0, 7], 7: [3] * 40}
    texts, rounds = serve(planned(plan), prompts, 60)
    for request, prompt in prompts.items():
        assert texts[request] == answer(prompt, len(texts[request]) - len(prompt))
    assert rounds >= 59 if plan == "off" else rounds < 55


def test_nodes_that_several_sources_propose_name_them_all() -> None:
    drafter = planned("budget:20/sources=suffix+ngram+ssm")
    drafter.begin(1, answer([1, 2], 40))
    tree = drafter.propose([DraftRequest(1, answer([1, 2], 40)[-1], 20, 8, SamplingParams())])[0]
    assert any("suffix+ngram" in source for source in tree.sources)
    assert {name for source in tree.sources for name in source.split("+")} == {"root", "suffix", "ngram", "ssm"}


def test_the_trees_of_two_ssms_are_united_whole() -> None:
    drafter = planned("tree:2,1/sources=ssm+ssm2")
    drafter.begin(1, [1, 2, 3])
    tree = drafter.propose([DraftRequest(1, 3, 64, 64, SamplingParams())])[0]
    best = np.argsort(-logits_after((1, 2, 3), VOCAB))[:2]
    first = {tree.tokens[i]: tree.sources[i] for i in tree.children()[0]}
    assert set(first) == {int(t) for t in best} | {int(t + 1) % VOCAB for t in best}
    assert {name for source in tree.sources[1:] for name in source.split("+")} == {"ssm", "ssm2"}


def test_learning_drops_what_is_never_accepted() -> None:
    drafter = planned("budget:20/sources=suffix+ngram", StepCost.from_points([(1, 1.0), (20, 3.0)]))
    prompt = answer([1, 2], 40)
    drafter.begin(1, prompt)
    ask = [DraftRequest(1, prompt[-1], 20, 8, SamplingParams())]
    before = len(drafter.propose(ask)[0])
    for _ in range(300):
        drafter.record(drafter.propose(ask)[0], [0])
    assert before > 3 and len(drafter.propose(ask)[0]) == 1, "nothing pays any more"


def test_costs_decide_how_much_is_verified() -> None:
    prompt = answer([1, 2], 40)
    sizes = []
    for slope in (0.0, 0.05, 5.0):
        drafter = planned("budget:20", StepCost.from_points([(1, 1.0), (2, 1.0 + slope), (21, 1.0 + 20 * slope)]))
        drafter.begin(1, prompt)
        sizes.append(len(drafter.propose([DraftRequest(1, prompt[-1], 20, 8, SamplingParams())])[0]))
    assert sizes[0] > sizes[1] > sizes[2] == 1


def test_requests_keep_their_own_limits() -> None:
    drafter = planned("budget:20")
    prompt = answer([1, 2], 40)
    for request in (1, 2, 3):
        drafter.begin(request, prompt)
    ask = [
        DraftRequest(r, prompt[-1], nodes, depth, SamplingParams())
        for r, nodes, depth in ((1, 3, 8), (2, 20, 1), (3, 0, 8))
    ]
    trees = drafter.propose(ask)
    assert len(trees[0]) == 4 and max(trees[1].depths) == 1 and len(trees[2]) == 1
    assert drafter.propose([]) == []


def test_a_mixed_tree_passes_uncut() -> None:
    drafter = planned("tree:2,2/sampled=mixed", StepCost.from_points([(1, 1.0)]))
    drafter.begin(1, [1, 2, 3])
    sampled = SamplingParams(temperature=1.0, seed=5)
    tree = drafter.propose([DraftRequest(1, 3, 64, 64, sampled)])[0]
    assert len(tree) == 7 and len(tree.laws) == 3
    assert len(drafter.propose([DraftRequest(1, 3, 5, 64, sampled)])[0]) == 3, "one level fits whole"


def test_an_ssm_is_asked_where_its_step_is_cheap_against_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlannedDrafter, "_miss", lambda self, tree: 0.5)  # the other sources know this text too well

    def steps(seconds_a_round: float) -> tuple[int, int]:
        """Steps of the SSM and rounds, when every round seems to take so long."""
        clock = itertools.count(0.0, seconds_a_round)
        drafter = planned(
            "budget:20/sources=suffix+ngram+ssm", StepCost.from_points([(1, 1.0), (64, 1.5)]), clock.__next__
        )
        _, rounds = serve(drafter, {1: [1, 2]}, 200)
        ssm = drafter.models[0]
        assert isinstance(ssm, SsmDrafter)
        return ssm.counts["steps"], rounds

    dear, rounds = steps(1e9)
    cheap, _ = steps(1e-12)
    assert dear > rounds > 5 * cheap > 0

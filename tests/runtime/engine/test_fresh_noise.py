"""Unseeded requests draw their drafts from fresh noise, also the first of every server."""

from __future__ import annotations

from collections import defaultdict

from engine_models import CONFIG, MIXED
from engine_runs import make_engine
from step_models import on_cpu, tiny_llm

from flexspec.runtime.executors.step import Executor
from flexspec.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=3, temperature=2.0, top_k=4)


def test_first_requests_of_fresh_servers_reach_every_token_of_the_law(llm: Executor) -> None:
    """A drafted token that is always the same is accepted as if it had been drawn: others come up too seldom."""
    ssm = on_cpu(*tiny_llm(CONFIG), pages=96)
    second: dict[int, set[int]] = defaultdict(set)
    asked: dict[int, int] = defaultdict(int)
    for _ in range(240):
        first, after = make_engine(llm, MIXED, {"ssm": ssm}).answers([[5, 6, 7]], [PARAMS])[0].tokens[:2]
        second[first].add(after)
        asked[first] += 1
    often = max(asked, key=lambda token: asked[token])
    assert asked[often] >= 60
    assert len(second[often]) == 4  # each has a few percent at least; none in 60 draws is a chance below 1e-3
    ssm.close()

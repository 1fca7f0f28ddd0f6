"""Real ranks whose work overlaps: SSMs wherever a plan can put them, several micro-batches, the texts of one rank."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from commands import serving
from rank_servers import ENDS_WITHIN_S, artifacts_for_ranks, rank_processes, texts_of_one_rank

from flexspec.compiler.artifact.plan import Plan, Stage
from flexspec.draft_plan import OPEN_BATCH, DraftLadder, DraftPlan
from flexspec.sampling import SamplingParams

pytestmark = pytest.mark.ranks

LADDER = DraftLadder(
    ((2, DraftPlan.parse("tree:1,2,1/sources=ssm")), (OPEN_BATCH, DraftPlan.parse("chain:3/sources=ssm+suffix")))
)
ONE, TP2, PP2 = (Stage(0, 2, (0,)),), (Stage(0, 2, (0, 1)),), (Stage(0, 1, (0,)), Stage(1, 2, (1,)))
PLANS = {
    "own": Plan(ONE, ((1,),), LADDER, "hand", micro_batches=(1, 2), ssm_place="own"),
    "first": Plan(PP2, ((0,),), LADDER, "hand", micro_batches=(2, 3), ssm_place="first"),
    "last": Plan(PP2, ((1,),), LADDER, "hand", micro_batches=(1, 2), ssm_place="last"),
    "all": Plan(TP2, ((0, 1),), LADDER, "hand", micro_batches=(1, 2), ssm_place="all"),
    "pipeline": Plan(PP2, ((2,),), LADDER, "hand", micro_batches=(1, 4), ssm_place="own"),
}
OPTIONS = ("--threads", "1", "--kv-tokens", "4096", "--no-checks")
PROMPTS = ["hello 12 hello", "the world 12 12", "é 🎉 hello", "x", "12", "world world"]
TOKENS = 40


@pytest.fixture(scope="module")
def folder() -> Path:
    return artifacts_for_ranks(PLANS, LADDER.for_batch(1))


@pytest.fixture(scope="module")
def told(folder: Path) -> list[str]:
    """What one rank answers without speculation."""
    return texts_of_one_rank(folder / "own.fspec", [(prompt, SamplingParams(max_tokens=TOKENS)) for prompt in PROMPTS])


@pytest.mark.parametrize("name", PLANS)
def test_any_place_of_the_ssm_and_any_micro_batches(folder: Path, told: list[str], name: str) -> None:
    plan = PLANS[name]
    ranks = 1 + max(rank for held in (*(stage.ranks for stage in plan.stages), *plan.ssm_ranks) for rank in held)
    with serving(folder / f"{name}.fspec", "--ranks", str(ranks), *OPTIONS) as server:
        with httpx.Client(base_url=server.url, timeout=120.0) as http:

            def ask(prompts: list[str]) -> list[str]:
                body = {"model": name, "prompt": prompts, "max_tokens": TOKENS, "temperature": 0}
                answer = http.post("/v1/completions", json=body).json()
                assert answer["usage"]["flexspec"]["accepted"] > 0
                return [choice["text"] for choice in answer["choices"]]

            assert ask(PROMPTS) == told
            with ThreadPoolExecutor() as pool:  # come and go one by one, so that batches and rungs change
                assert [text for (text,) in pool.map(ask, [[prompt] for prompt in PROMPTS])] == told
        assert server.stop(signal.SIGTERM) == 0
        assert server.process.stderr is not None and server.process.stderr.read() == ""  # no warning of torch's either


def test_a_rank_that_only_drafts_can_die_too(folder: Path) -> None:
    with serving(folder / "own.fspec", "--ranks", "2", *OPTIONS) as server:
        victim = rank_processes(server.process.pid)[1]
        body = {"model": "own", "prompt": "hello", "max_tokens": 240, "temperature": 0, "stream": True}
        text = ""
        try:
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=120.0
            ) as answer:
                assert answer.status_code == 200
                lines = answer.iter_lines()
                text += next(lines)
                os.kill(victim, signal.SIGKILL)
                began = time.monotonic()
                text += "".join(lines)
        except httpx.TransportError:
            text += " error: cut"
        assert "error" in text and time.monotonic() - began < ENDS_WITHIN_S
        assert server.process.wait(120) != 0

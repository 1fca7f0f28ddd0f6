"""Drafting through messages: the trees of a drafter at hand, on one rank or shared out over several."""

from __future__ import annotations

import numpy as np
import pytest
from overlapping import Courier, Noting
from table_ssm import TableSsm, llm_feature

from flexspec.draft_plan import DraftPlan
from flexspec.errors import EngineError
from flexspec.runtime.distributed.drafts import DraftHost, RemoteDrafter, decode_trees, encode, encode_trees
from flexspec.runtime.drafters.base import DistantDrafter, DraftRequest, ModelDrafter
from flexspec.runtime.drafters.ssm import SsmDrafter
from flexspec.runtime.drafters.worth import StepWorth
from flexspec.sampling import SamplingParams
from flexspec.tree import TokenTree

VOCAB = 40
PLAN = DraftPlan.parse("tree:2,2,1")
MIXED = DraftPlan.parse("tree:2,2,1/sampled=mixed")


def ssm(*, fused: bool = False) -> Noting:
    table = TableSsm(VOCAB, fused=fused)
    made = Noting(table, PLAN.expansion, VOCAB, reads_features=fused)
    made.table = table
    return made


def remote(hosts: list[Noting], own: Noting | None = None) -> RemoteDrafter:
    posts = [Courier(DraftHost([host])) for host in hosts]
    ticks = iter(range(10_000))
    reads = hosts[0].reads_features
    return RemoteDrafter("ssm", posts, own, reads_features=reads, clock=lambda: float(next(ticks)))


def drive(
    drafter: SsmDrafter | RemoteDrafter, plan: DraftPlan = PLAN, ssms: list[Noting] | None = None
) -> list[list[TokenTree]]:
    """Rounds of several requests that come, commit and go; greedy ones and sampled ones. ``ssms`` check their rows."""
    drafter.use(plan)
    texts = {ident: [ident, 7, 3 + ident] for ident in range(5)}
    for each in ssms or []:
        each.table.texts.extend(texts.values())
    made = []
    params = [SamplingParams(), SamplingParams(temperature=0.9, seed=4, top_k=11, stop=("x",))]
    for ident, text in texts.items():
        drafter.begin(ident, text)
        features = np.stack([llm_feature(tuple(text[: i + 1])) for i in range(len(text))])
        drafter.observe_prompt(ident, 0, features if drafter.reads_features else None)
    for turn in range(4):
        for ident, text in texts.items():
            tokens = [(turn + ident) % VOCAB, 5][: 1 + turn % 2]
            features = np.stack([llm_feature(tuple(text + tokens[:i])) for i in range(len(tokens))])
            text.extend(tokens)
            drafter.observe(ident, tokens, features if drafter.reads_features else None)
        asked = [DraftRequest(ident, text[-1], 10, 3, params[ident % 2], 40 + ident) for ident, text in texts.items()]
        made.append(drafter.propose(asked))
        if turn == 2:
            drafter.end(1)
            del texts[1]
    return made


def equal(found: list[list[TokenTree]], wanted: list[list[TokenTree]]) -> None:
    for one, other in zip(found, wanted, strict=True):
        for tree, same in zip(one, other, strict=True):
            assert (tree.tokens, tree.parents, tree.scores, tree.sources) == (
                same.tokens, same.parents, same.scores, same.sources,
            )  # fmt: skip
            assert tree.laws.keys() == same.laws.keys()
            assert all(np.array_equal(tree.laws[node], same.laws[node]) for node in tree.laws)


@pytest.mark.parametrize("plan", [PLAN, MIXED])
@pytest.mark.parametrize("fused", [False, True])
def test_another_rank_drafts_what_this_one_would(plan: DraftPlan, fused: bool) -> None:
    there, here = ssm(fused=fused), ssm(fused=fused)
    trees = drive(remote([there]), plan, [there])
    equal(trees, drive(here, plan, [here]))
    assert any(tree.laws for turn in trees for tree in turn) == (plan is MIXED)


@pytest.mark.parametrize("own", [False, True])
def test_requests_are_shared_out_over_the_ranks(own: bool) -> None:
    hosts, mine = [ssm(), ssm()], ssm() if own else None
    equal(drive(remote(hosts, mine)), drive(ssm()))
    shares = [host.asked[0] for host in ([mine] if mine else []) + hosts]
    assert sorted(ident for share in shares for ident in share) == list(range(5))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_two_drafts_are_under_way_at_once() -> None:
    drafter, plain = remote([ssm()]), ssm()
    assert isinstance(drafter, DistantDrafter) and isinstance(plain, ModelDrafter)
    assert not isinstance(plain, DistantDrafter)
    asked = [DraftRequest(ident, 2, 10, 3, SamplingParams()) for ident in range(2)]
    for each in (drafter, plain):
        each.use(PLAN)
        for ident in range(2):
            each.begin(ident, [ident, 1])
            each.observe(ident, [2], None)
    drafter.start(asked[:1])
    drafter.use(DraftPlan.parse("chain:1/sources=ssm"))  # of the next draft; this one keeps its own
    drafter.start(asked[1:])
    first = drafter.finish()
    drafter.end(1)
    second = drafter.finish()
    equal([first], [plain.propose(asked[:1])])
    assert len(first[0]) == 11 and len(second[0]) == 2


def test_its_worth_counts_the_whole_draft() -> None:
    drafter = remote([ssm()])
    drafter.worth = StepWorth("ssm", by_level=False)
    drive(drafter)
    tree = TokenTree.chain([1, 2, 3], "ssm")
    assert drafter.worth.ask(0, 1.0)
    drafter.worth.accepted(tree, [0, 1, 2])
    before = drafter.worth.gain(0, 1.0)
    drafter.worth.begin_round(1, None)
    assert drafter.worth.gain(0, 1.0) > before  # both nodes, at whatever depth


def test_unknown_requests_get_a_root() -> None:
    drafter = remote([ssm()])
    drafter.use(PLAN)
    drafter.observe(9, [1], None)
    drafter.end(9)
    assert [tree.tokens for tree in drafter.propose([DraftRequest(9, 3, 10, 3, SamplingParams())])] == [(3,)]


def test_what_cannot_be_read_is_an_error() -> None:
    host = DraftHost([ssm()])
    good = {"ssm": "ssm", "events": [], "plan": "tree:2,2,1", "requests": []}
    assert encode(good, []).flags.writeable  # torch warns of what is not
    assert decode_trees(host.answer(encode(good, [])), "ssm") == {}
    for bad in (
        {**good, "ssm": "other"}, {**good, "events": [["leap", 1, None]]}, {**good, "requests": [[1]]}, {"events": 3},
    ):  # fmt: skip
        with pytest.raises(EngineError, match="cannot be read"):
            host.answer(encode(bad, []))
    for raw in (b"", b"\x05\0\0\0\0\0\0\0nonsense", b"\xff" * 12):
        with pytest.raises(EngineError, match="cannot be read"):
            host.answer(np.frombuffer(raw, np.uint8))
    body = encode_trees([3], [TokenTree((1, 2), (-1, 0), ("root", "ssm"), (1.0, 0.5), {1: np.ones(4)})])
    with pytest.raises(EngineError, match="cannot be read"):
        decode_trees(body[:-8], "ssm")

"""Plans: their text, their refusals, and the worst case that every pool is sized by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexspec.draft_plan import DraftPlan, WorstCase, worst_case
from flexspec.errors import RequestError


@pytest.mark.parametrize(
    "text, plan, worst",
    [
        ("off", DraftPlan("off"), WorstCase(0, 0, 0)),
        ("chain:4", DraftPlan("chain", max_depth=4), WorstCase(4, 4, 0)),
        ("chain:4/sources=ssm", DraftPlan("chain", max_depth=4, sources=("ssm",)), WorstCase(4, 4, 3)),
        ("tree:1,1,3,1,1,1,1,1", DraftPlan("tree", (1, 1, 3, 1, 1, 1, 1, 1), sources=("ssm",)), WorstCase(20, 8, 17)),
        ("tree:<2,2,1>", DraftPlan("tree", (2, 2, 1), sources=("ssm",)), WorstCase(10, 3, 6)),
        ("tree:2,2,1/sources=ssm+ssm2", DraftPlan("tree", (2, 2, 1), sources=("ssm", "ssm2")), WorstCase(20, 3, 6)),
        ("budget:8", DraftPlan("budget", max_nodes=8), WorstCase(8, 8, 0)),
        (
            "budget:24/depth=6/ssm_depth=3/beam=4/sources=suffix+ngram+ssm",
            DraftPlan(
                "budget",
                max_nodes=24,
                max_depth=6,
                options=(("ssm_depth", 3), ("beam", 4)),
                sources=("suffix", "ngram", "ssm"),
            ),
            WorstCase(24, 6, 8),
        ),
    ],
)
def test_texts_parse_and_have_a_worst_case(text: str, plan: DraftPlan, worst: WorstCase) -> None:
    assert DraftPlan.parse(text) == plan
    assert DraftPlan.parse(str(plan)) == plan
    assert worst_case(plan) == worst


@given(
    st.one_of(
        st.builds(DraftPlan, st.just("chain"), max_depth=st.integers(1, 64), sources=st.just(("ngram",))),
        st.builds(
            DraftPlan, st.just("budget"), max_nodes=st.integers(1, 255), max_depth=st.integers(1, 64),
            options=st.tuples(
                st.tuples(st.just("ssm_depth"), st.integers(1, 8)), st.tuples(st.just("beam"), st.integers(1, 16))
            ),
            sources=st.permutations(["suffix", "ngram", "ssm"]).map(tuple),
        ),
        st.builds(
            DraftPlan, st.just("tree"), st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple),
            max_nodes=st.integers(1, 200), sources=st.sampled_from([("ssm",), ("ssm", "suffix")]),
        ),
    )
)  # fmt: skip
def test_text_round_trips(plan: DraftPlan) -> None:
    assert DraftPlan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    "text, named",
    [
        ("", "method ''"),
        ("tre:1", "method 'tre'"),
        ("chain", "without a size"),
        ("chain:0", "depth 0"),
        ("chain:65", "depth 65"),
        ("chain:²", "'²'"),
        ("off:3", "off"),
        ("tree:", "without a size"),
        ("tree:2,x", "'x'"),
        ("tree:8,8,8,8", "nodes"),
        ("budget:256", "nodes 256"),
        ("budget:-1", "'-1'"),
        ("budget:8/sources=suffix+suffix", "each once"),
        ("budget:8/sources=", "sources ''"),
        ("budget:8/sources=medusa", "'medusa'"),
        ("budget:8/width=3", "'width=3'"),
        ("budget:8/depth", "'depth'"),
        ("budget:8/beam=256", "beam 256"),
        ("budget:8/sampled=mixed", "sampled=mixed"),
        ("tree:2,2/sampled=all", "'all'"),
        ("tree:2,2/sources=suffix", "method tree"),
        ("tree:2,2/sources=ssm+ssm2/sampled=mixed", "sampled=mixed"),
    ],
)
def test_refusals_name_what_is_wrong(text: str, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        DraftPlan.parse(text)
    assert named in str(caught.value) and caught.value.param == "draft" and caught.value.fix


def test_an_option_at_its_default_makes_no_other_plan() -> None:
    plan = DraftPlan.parse("budget:8/beam=4/ssm_depth=3/sources=ssm")
    assert (
        plan == DraftPlan.parse("budget:8/sources=ssm/ssm_depth=3") and str(plan) == "budget:8/ssm_depth=3/sources=ssm"
    )
    assert (plan.option("beam"), plan.option("ssm_depth")) == (4, 3)


@pytest.mark.parametrize("text", ["budget:8/beam=3/sources=suffix+ngram", "budget:8/beam=4/sources=suffix+ngram"])
def test_an_option_of_a_drafter_that_is_no_source_is_refused(text: str) -> None:
    """One at its default, too: it would change nothing, which whoever wrote it does not know."""
    refusal = (
        r"draft option beam=. of ssm, with sources suffix\+ngram; .*leave beam out, or write sources=suffix\+ngram\+ssm"
    )
    with pytest.raises(RequestError, match=refusal):
        DraftPlan.parse(text)
    plan = DraftPlan.parse("budget:8/beam=3", ("suffix", "ssm2"))
    assert plan.sources == ("suffix", "ssm2") and plan.option("beam") == 3, "whoever parses may know the sources"
    assert plan.with_sources(("suffix",)).options == ()

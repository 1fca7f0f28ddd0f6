"""A request's context in an SSM: whatever happens, slots and pending tokens are one run of the sequence's positions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flexspec.runtime.drafters.ssm_context import Context

actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(st.just("feed"), st.integers(1, 5)),
        st.tuples(st.just("again"), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, 3)),
    ),
    max_size=20,
)


@given(actions, st.booleans())
def test_positions_follow_from_what_is_cached_and_pending(actions: list[tuple[str, int]], fused: bool) -> None:
    """Token and feature of every position are the position itself; ``cache`` is what the steps would have written."""
    context, cache, position = Context(), list[int](), 0
    for action, count in actions:
        if action == "append":
            tokens = list(range(position, position + count))
            context.append(tokens, [np.array([token], np.float32) for token in tokens] if fused else [])
            position += count
        elif action == "feed" and context.pending:
            first, slot = context.next_to_feed, context.cached
            tokens, features = context.feed(min(count, len(context.pending)))
            assert tokens == list(range(first, first + len(tokens)))
            assert [int(feature[0]) for feature in features] == (tokens if fused else [])
            cache[slot:] = tokens
        elif action == "again":
            assert context.feed_root_again() == bool(context.pending)
            if context.pending:
                assert context.pending[-1] == context.root_position
        elif action == "restart":
            position += count
            context.restart(position)
            cache.clear()
        assert context.next_position == position
        assert cache[: context.cached] == list(range(context.first_position, context.next_to_feed))
        assert context.pending == list(range(context.next_to_feed, position))
        assert len(context.features) == (len(context.pending) if fused else 0)
        fed = context.cached and not context.pending
        assert not fed or (context.newest is not None and context.newest[0] == context.root_position)

"""Messages between ranks: what is read is what was written, and invalid sizes are refused before reading."""

from __future__ import annotations

import re
from dataclasses import fields

import numpy as np
import pytest
from step_models import chain_rows, random_tree, tree_rows

from flexspec.errors import EngineError
from flexspec.runtime.distributed.message import (
    MOVE,
    STEP,
    STOP,
    check_header,
    decode_move,
    decode_step,
    encode_move,
    encode_step,
    encode_stop,
)
from flexspec.runtime.executors.pages import pack_rows
from flexspec.runtime.executors.room import Room

ROOM = Room(max_rows=96, pages=8)


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True)])
def test_a_step_comes_through(flags: tuple[bool, bool]) -> None:
    tree = random_tree(np.random.default_rng(0), 70, 200)
    batch = pack_rows([tree_rows(tree, 35, [3, 1, 2, 4]), chain_rows([7, 8, 9], 2, [5])])
    header, body = encode_step(batch, *flags)
    assert check_header(header, ROOM) == (STEP, body.nbytes)
    told = decode_step(header, body)
    assert (told.want_logits, told.want_features) == flags
    for field in fields(batch):
        sent, got = getattr(batch, field.name), getattr(told.batch, field.name)
        assert (sent is None and got is None) or (sent.dtype == got.dtype and np.array_equal(sent, got))


def test_moves_and_the_end_come_through() -> None:
    source, target = np.array([9, 12], np.int32), np.array([8, 9], np.int32)
    header, body = encode_move(source, target)
    assert check_header(header, ROOM) == (MOVE, 16)
    assert [list(slots) for slots in decode_move(body)] == [[9, 12], [8, 9]]
    assert check_header(encode_stop(), ROOM) == (STOP, 0)


@pytest.mark.parametrize(
    ("word", "bad", "good"),
    [
        pytest.param(0, 1, None, id="magic"),
        pytest.param(1, 9, None, id="kind"),
        pytest.param(2, 97, 96, id="more-rows-than-a-step-takes"),
        pytest.param(2, 0, 3, id="no-rows"),
        pytest.param(2, 2, 3, id="fewer-rows-than-logits"),
        pytest.param(3, 4, 3, id="more-requests-than-rows"),
        pytest.param(3, 0, 1, id="no-requests"),
        pytest.param(4, 9, 8, id="more-pages-than-the-pool"),
        pytest.param(5, 3, 2, id="more-ancestor-words-than-rows-need"),
        pytest.param(6, 4, 3, id="more-logits-than-rows"),
        pytest.param(6, -1, 0, id="negative"),
        pytest.param(7, 4, 3, id="unknown-flag"),
    ],
)
def test_invalid_headers_are_refused(word: int, bad: int, good: int | None) -> None:
    """Each for the one word that was changed: with ``good`` there, the nearest valid number, it is a step."""
    header, _ = encode_step(pack_rows([chain_rows([7, 8, 9], 2, [5])]), True, True)
    header[word] = header[word] if good is None else good
    assert check_header(header, ROOM)[0] == STEP
    header[word] = bad
    with pytest.raises(EngineError, match=re.escape(str(header.tolist()))):
        check_header(header, ROOM)

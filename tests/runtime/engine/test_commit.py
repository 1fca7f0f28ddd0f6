"""commit(): every way a sequence can end, at every token edge, however tokens were grouped into blocks."""

from __future__ import annotations

import ast
import codecs
import itertools
from collections import abc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexspec
from flexspec.runtime.engine.commit import Committed, commit
from flexspec.runtime.engine.sequence import TokenSequence
from flexspec.runtime.engine.stop_strings import StopMatcher
from flexspec.sampling import SamplingParams
from repository import parsed

EOS = 256


class Utf8:
    """Token = byte; characters come out when they are complete; EOS gives no text."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: list[int]) -> str:
        return "".join(self.decoder.decode(bytes([token])) for token in tokens if token != EOS)

    def hidden(self, token: int) -> str:
        return "<end>" if token == EOS else ""

    def flush(self) -> str:
        return self.decoder.decode(b"", final=True)


class Words:
    """Token = index of a string."""

    def __init__(self, words: abc.Sequence[str]) -> None:
        self.words = words

    def push(self, tokens: list[int]) -> str:
        return "".join(self.words[token] for token in tokens if token < len(self.words))

    def hidden(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def sequence(detokenizer=None, context_limit: int = 10_000, prompt: int = 3, **params) -> TokenSequence:
    sampling = SamplingParams(**{"max_tokens": 5000, **params})
    return TokenSequence(1, list(range(prompt)), sampling, [EOS], context_limit, detokenizer or Utf8())


def run(seq: TokenSequence, blocks: abc.Iterable[abc.Sequence[int]]) -> str:
    """Commit block by block until the end; the text."""
    text = ""
    for block in blocks:
        if seq.finish_reason is None:
            text += commit(seq, block).text
    return text


def test_plain_tokens() -> None:
    seq = sequence()
    assert commit(seq, list(b"hello")) == Committed(5, "hello", None)
    assert commit(seq, []) == Committed(0, "", None)
    assert (len(seq), seq.last_token, list(seq.output_ids)) == (8, ord("o"), list(b"hello"))
    assert sequence(prompt=4).last_token == 3


def test_an_end_token_inside_an_accepted_block() -> None:
    """sglang#31599: text behind the end was returned, with reason "length"."""
    seq = sequence(max_tokens=5)
    assert commit(seq, [*b"ab", EOS, *b"cd"]) == Committed(3, "ab", "stop")
    assert seq.stats.completion_tokens == 3 and list(seq.output_ids) == [*b"ab", EOS]


def test_an_end_token_first() -> None:
    seq = sequence()
    assert commit(seq, [EOS]) == Committed(1, "", "stop")


def test_a_drafted_end_token_that_is_not_accepted_ends_nothing() -> None:
    """Only committed tokens are looked at: openvino.genai#3293 finished on the draft's."""
    seq = sequence()
    seq.record_round(drafted=3, accepted=0)
    assert commit(seq, list(b"x")).finish_reason is None


def test_ignore_eos() -> None:
    seq = sequence(ignore_eos=True, max_tokens=4)
    assert commit(seq, [*b"a", EOS, *b"bcd"]) == Committed(4, "abc", "length")


def test_end_token_and_length_at_the_same_token_is_a_stop() -> None:
    assert commit(sequence(max_tokens=3), [*b"ab", EOS]).finish_reason == "stop"
    assert commit(sequence(context_limit=6), [*b"ab", EOS]).finish_reason == "stop"
    assert commit(sequence(max_tokens=2, stop=("b",)), list(b"abc")) == Committed(2, "a", "stop")


@pytest.mark.parametrize("k", [1, 4, 7])
def test_a_round_never_overshoots(k) -> None:
    """max_tokens 1..k+2 with blocks of k + 1, all accepted."""
    for limit in range(1, k + 3):
        for seq in (sequence(max_tokens=limit), sequence(context_limit=3 + limit)):
            assert seq.tokens_left == limit
            text = run(seq, [b"x" * (k + 1)] * 3)
            assert (text, seq.finish_reason, seq.stats.completion_tokens) == ("x" * limit, "length", limit)
            assert seq.tokens_left == 0


def test_nothing_after_the_end() -> None:
    seq = sequence(max_tokens=1)
    commit(seq, list(b"ab"))
    with pytest.raises(AssertionError, match="finished"):
        commit(seq, list(b"c"))
    other = sequence()
    other.abort("cancelled")
    with pytest.raises(AssertionError, match="finished"):
        commit(other, list(b"c"))


@pytest.mark.parametrize("stop", ["S", "ST", "STO", "STOP", "STOP!", "\n\nSTP"])
@pytest.mark.parametrize("before", [0, 1, 2, 5])
def test_a_stop_string_cut_at_every_token_edge(stop, before) -> None:
    whole = "-" * before + stop + "tail"
    for left in range(len(whole) + 1):
        for right in range(left, len(whole) + 1):
            words = [whole[:left], whole[left:right], whole[right:]]
            seq = sequence(Words(words), stop=(stop,))
            committed = commit(seq, [0, 1, 2])
            assert (committed.text, committed.finish_reason) == ("-" * before, "stop")
            ends = next(n for n in (1, 2, 3) if before + len(stop) <= len("".join(words[:n])))
            assert committed.count == seq.stats.completion_tokens == ends


def test_text_waits_only_while_it_may_become_a_stop_string() -> None:
    seq = sequence(stop=("END",))
    assert [commit(seq, [c]).text for c in b"xENxEENEND"] == ["x", "", "", "ENx", "", "E", "", "EN", "", ""]
    assert seq.finish_reason == "stop"


@pytest.mark.parametrize("ending", [{"max_tokens": 3}, {"context_limit": 6}])
def test_text_held_back_comes_out_at_the_end(ending) -> None:
    assert run(sequence(stop=("ENDE",), **ending), [b"xEN"]) == "xEN"
    assert run(sequence(stop=("ENDE",)), [[*b"xEN", EOS]]) == "xEN"


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (("aab",), "aaab", "a"), (("aab",), "xaaaaabx", "xaaa"), (("abab",), "abaabab", "aba"),
        (("abcabd",), "abcabcabd", "abc"),
        (("bcd", "c"), "abcd", "ab"), (("cd", "bcd"), "abcd", "a"), (("abc", "b"), "abc", "a"),
        (("xyz", "yq"), "xyq", "x"),
        (("END", "stop"), "the sto END", "the sto "), (("a", "a"), "ba", "b"),
    ],
)  # fmt: skip
def test_overlapping_prefixes(stops, text, shown) -> None:
    for size in range(1, len(text) + 1):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert run(sequence(Words(pieces), stop=stops), [[at] for at in range(len(pieces))]) == shown
    assert run(sequence(Words([text]), stop=stops), [[0]]) == shown


def test_a_stop_string_of_multi_byte_characters() -> None:
    data = "naïve 👍🏽 fin".encode()
    for edge in range(len(data)):
        seq = sequence(stop=("👍",))
        assert run(seq, [data[:edge], data[edge:]]) == "naïve "
        assert seq.finish_reason == "stop"
        assert seq.stats.completion_tokens == len("naïve 👍".encode())


def test_a_character_cut_by_the_limit_is_not_shown() -> None:
    data = "a€".encode()
    assert run(sequence(max_tokens=3), [data]) == "a"
    assert run(sequence(), [[*data[:3], EOS]]) == "a\N{REPLACEMENT CHARACTER}"
    cut = sequence(stop=("\N{REPLACEMENT CHARACTER}",))
    assert (run(cut, [[*data[:3], EOS]]), cut.finish_reason) == ("a", "stop")


def first_stop(text: str, stops: abc.Sequence[str]) -> tuple[int, int] | None:
    """(start, end) of the stop string that is complete first, by brute force."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=24), st.lists(st.text("ab", min_size=1, max_size=6), max_size=3), st.data())
def test_matcher_equals_brute_force(text, stops, data) -> None:
    matcher, shown, at = StopMatcher(stops), "", 0
    found = first_stop(text, stops)
    while at < len(text):
        size = data.draw(st.integers(1, 5))
        piece, matched = matcher.push(text[at : at + size])
        shown, at = shown + piece, at + size
        if matched:
            break
        waiting = text[:at].removeprefix(shown)
        longest = max((n for s in stops for n in range(1, len(s)) if text[:at].endswith(s[:n])), default=0)
        assert len(waiting) == longest
    if found:
        assert shown == text[: found[0]] and at >= found[1]
    else:
        assert shown + matcher.flush() == text


STREAM = st.lists(st.sampled_from([*"abé👍".encode(), ord("S"), ord("T"), 0x80, EOS]), max_size=40)
STOPS = st.lists(st.sampled_from(["a", "aab", "STa", "é", "👍a", "TS", "bS", "\N{REPLACEMENT CHARACTER}"]), max_size=3)


@settings(max_examples=400, deadline=None)
@given(STREAM, STOPS, st.integers(1, 45), st.integers(4, 48), st.booleans(), st.lists(st.integers(0, 7), max_size=20))
def test_any_partition_into_blocks_gives_the_same(tokens, stops, max_tokens, limit, ignore_eos, sizes) -> None:
    def fresh() -> TokenSequence:
        return sequence(stop=tuple(stops), max_tokens=max_tokens, context_limit=limit, ignore_eos=ignore_eos)

    one, many = fresh(), fresh()
    cuts = [0, *itertools.accumulate(sizes), len(tokens)]
    blocks = [tokens[start:end] for start, end in itertools.pairwise(cuts)]
    texts = run(one, [[token] for token in tokens]), run(many, blocks)
    assert texts[0] == texts[1]
    assert list(one.output_ids) == list(many.output_ids)
    assert one.finish_reason == many.finish_reason
    assert one.stats == many.stats
    assert one.stats.completion_tokens <= min(max_tokens, limit - 3)
    assert all(stop not in texts[0] for stop in stops)


def test_seeds() -> None:
    assert sequence(seed=-5).seed == -5
    assert len({sequence().seed for _ in range(16)}) == 16, "unseeded requests must not share their noise"


def test_counters() -> None:
    seq = sequence()
    seq.record_round(8, 3)
    seq.record_round(8, 0)
    commit(seq, list(b"abcde"))
    stats = seq.stats
    assert (stats.prompt_tokens, stats.completion_tokens, stats.rounds, stats.drafted, stats.accepted) == (
        3,
        5,
        2,
        16,
        3,
    )


def test_commit_alone_appends() -> None:
    """No other file of the package calls append_committed or reaches for the list behind output_ids."""
    root = Path(flexspec.__file__).parent
    folders = [root, *(root / part for part in ("compiler", "kernels", "runtime"))]  # rglob does not follow links
    users = {
        path.name
        for folder in folders
        for path in folder.resolve().rglob("*.py")
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("append_committed", "_output_ids")
    }
    assert users == {"sequence.py", "commit.py"}


@pytest.mark.parametrize(
    ("stop", "tokens", "text", "kept"),
    [
        ("<end>", [*b"ab", EOS, *b"cd"], "ab", 3),
        ("b\n<end>", [*b"ab\n", EOS, *b"cd"], "a", 4),
        ("<end>cd", [*b"ab", EOS, *b"cde"], "ab", 5),
        ("<end>", [*b"a<end>b"], "a", 6),
        ("bc", [*b"ab", EOS, *b"cd"], "a", 4),
        ("<end>x", [*b"ab", EOS, *b"cd"], "abcd", 5),
        ("b<e", [*b"ab", EOS, *b"cd"], "a", 3),
    ],
    ids=["alone", "after text", "before text", "spelt", "across it, in what is shown", "not there", "a part of it"],
)
def test_stop_strings_match_special_tokens(stop: str, tokens: list[int], text: str, kept: int) -> None:
    """The token's text is not shown, so shown text alone cannot match it; in one block or token by token."""
    for blocks in ([tokens], [[token] for token in tokens]):
        seq = sequence(stop=(stop,), ignore_eos=True)
        shown = "".join(commit(seq, block).text for block in blocks if seq.finish_reason is None)
        assert (shown + seq.stops.flush(), len(seq.output_ids)) == (text, kept)
        assert (seq.finish_reason == "stop") == (text != "abcd")

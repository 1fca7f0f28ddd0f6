"""The only code that appends tokens to a sequence, whatever they come from: prefill, decoding, any drafter, any rule.

Owns every rule of ending. Accepted tokens are walked one by one, so a block can't run past an end: end token, stop
string, max_tokens and the context limit each take effect at the very token where they occur, and what follows is
dropped and not counted. Treating a block as one token is the most frequent fault of speculative engines.

The rules, in the order they are tried at each token:
1. end token: "stop". It has no text, and is counted in completion_tokens, as in OpenAI's usage.
2. stop string complete: "stop". The text before it is returned, the string and what follows never are. All tokens up to
   the one that completed it are counted. A special token has its text here. Text is held back only while it may still
   become a stop string.
3. max_tokens or the context limit reached: "length".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexspec.runtime.engine.sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit appended."""

    count: int  # tokens appended: all, unless one of them ended the sequence
    text: str  # that may be shown now
    finish_reason: str | None


def commit(sequence: TokenSequence, tokens: Sequence[int]) -> Committed:
    """Append ``tokens`` up to and including the one that ends the sequence, if any does."""
    assert sequence.finish_reason is None, "nothing is committed to a finished sequence"
    shown: list[str] = []
    count = 0
    for token in tokens:
        sequence.append_committed(int(token))
        count += 1
        text, reason = _step(sequence, int(token))
        shown.append(text)
        if reason is not None:
            sequence.finish_reason = reason
            break
    return Committed(count, "".join(shown), sequence.finish_reason)


def _step(sequence: TokenSequence, token: int) -> tuple[str, str | None]:
    """(text, reason to end) of the token that was just appended."""
    if token in sequence.eos_ids:
        return _close(sequence, "", "stop")
    detokenizer = sequence.detokenizer
    text, stopped = sequence.stops.push(detokenizer.push([token]), detokenizer.hidden(token))
    if stopped:
        return text, "stop"
    if sequence.tokens_left <= 0:
        return _close(sequence, text, "length")
    return text, None


def _close(sequence: TokenSequence, text: str, reason: str) -> tuple[str, str]:
    """Add the text that was held back; the detokenizer's rest may complete a stop string.

    An answer that is cut inside a character ends before it: its bytes were not asked for as a U+FFFD.
    """
    rest, stopped = sequence.stops.push("" if reason == "length" else sequence.detokenizer.flush())
    if stopped:
        return text + rest, "stop"
    return text + rest + sequence.stops.flush(), reason

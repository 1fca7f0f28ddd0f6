"""Values of every sampling parameter, for the tests of all that must know of it: command, HTTP, ranks.

A parameter with a range has values by it; the table is for the others, and for more to be refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexspec.sampling import SamplingField, sampling_fields


@dataclass(frozen=True)
class Values:
    """Of one parameter."""

    other: Any  # not its default, nor OpenAI's
    words: tuple[str, ...]  # ``other`` on the command line
    refused: tuple[Any, ...]  # in an HTTP body: out of range, or of another type


_TABLE = {
    "max_tokens": Values(5, ("--max-tokens", "5"), refused=(0, -1, 1.0, "3", True, 10**400)),
    "temperature": Values(
        0.5, ("--temperature", "0.5"), refused=(-0.1, 2.1, float("nan"), float("inf"), "1", True, [1])
    ),
    "top_k": Values(2, ("--top-k", "2"), refused=(-2, 1.5, 10**400)),
    "seed": Values(-3, ("--seed", "-3"), refused=(2**64, 1.5, "1")),
    "stop": Values(("a", "b"), ("--stop", "a", "--stop", "b"), refused=("", [""], ["x"] * 17, 3, [3], "\ud83d")),
    "ignore_eos": Values(True, ("--ignore-eos",), refused=("no",)),
}


def _by_range(name: str, record: SamplingField) -> Values:
    """A value in the lowest quarter of the range, and what lies at both sides of it."""
    assert record.low is not None and record.high is not None, f"{name} has no range: give it a row of the table"
    whole = isinstance(record.low, int)
    other = record.low + (2 if whole else (record.high - record.low) / 4)
    return Values(
        other, (f"--{name.replace('_', '-')}", str(other)), refused=(record.low - 1, record.high + 1, "1", True)
    )


SAMPLING_VALUES = {name: _TABLE.get(name) or _by_range(name, record) for name, record in sampling_fields().items()}

"""Values of every sampling parameter, for the tests of all that must know of it: command, HTTP, ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Values:
    """Of one parameter."""

    other: Any  # not its default, nor OpenAI's
    words: tuple[str, ...]  # ``other`` on the command line
    refused: tuple[Any, ...]  # in an HTTP body: out of range, or of another type


SAMPLING_VALUES = {
    "max_tokens": Values(5, ("--max-tokens", "5"), refused=(0, -1, 1.0, "3", True, 10**400)),
    "temperature": Values(
        0.5, ("--temperature", "0.5"), refused=(-0.1, 2.1, float("nan"), float("inf"), "1", True, [1])
    ),
    "top_p": Values(0.5, ("--top-p", "0.5"), refused=(-0.1, 1.1)),
    "top_k": Values(2, ("--top-k", "2"), refused=(-2, 1.5, 10**400)),
    "min_p": Values(0.5, ("--min-p", "0.5"), refused=(-0.1, 1.1)),
    "seed": Values(-3, ("--seed", "-3"), refused=(2**64, 1.5, "1")),
    "stop": Values(("a", "b"), ("--stop", "a", "--stop", "b"), refused=("", [""], ["x"] * 17, 3, [3], "\ud83d")),
    "ignore_eos": Values(True, ("--ignore-eos",), refused=("no",)),
}

"""Sampling parameters of a request, checked once at the door."""

from __future__ import annotations

from dataclasses import dataclass

from flexspec.errors import RequestError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request may set. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 switch the filter off.

    ``seed`` None draws a fresh one per request. ``stop`` strings end the text before themselves. Raises RequestError
    (FS501, with ``param``) for a value out of range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, 1, 1_000_000)
        _check("temperature", self.temperature, 0.0, 2.0)
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("top_k", self.top_k, 0, 10_000_000)
        _check("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check("seed", self.seed, -(2**63), 2**64 - 1)
        if len(self.stop) > 16 or any(not s or len(s) > 1024 for s in self.stop):
            raise RequestError(
                f"stop={list(self.stop)!r}", "at most 16 non-empty strings of up to 1024 characters",
                "shorten the stop list", param="stop",
            )  # fmt: skip

    @property
    def greedy(self) -> bool:
        """True when every token is the argmax. Temperatures this small underflow to it in float32 as well."""
        return self.temperature < 1e-5 or self.top_k == 1 or self.top_p < 1e-9


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # refuses NaN too, and integers too large for a float
        raise RequestError(
            f"{name}={value!r}", f"a number from {low:g} to {high:g}", f"send {name} inside that range", param=name
        )

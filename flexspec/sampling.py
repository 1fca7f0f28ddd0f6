"""Sampling parameters of a request: every field with its default, range and help, checked once on entry.

A parameter is added here; the command's options (flexspec/cli/options/sampling.py), the check of HTTP bodies
(runtime/server/requests.py) and the messages between ranks (runtime/distributed/drafts.py) follow its record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from flexspec.errors import RequestError

_RECORD = "sampling"


@dataclass(frozen=True, slots=True)
class SamplingField:
    """What is known of a parameter besides its name, type and default."""

    help: str  # what it does; the command line adds the default
    shapes_law: bool  # whether the target law depends on it, or the noise with which a token is drawn
    low: float | None = None  # its range, inclusive; an int if it takes integers only; None: not a number
    high: float | None = None


def _parameter(
    default: Any, help: str, *, shapes_law: bool, low: float | None = None, high: float | None = None
) -> Any:
    return field(default=default, metadata={_RECORD: SamplingField(help, shapes_law, low, high)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request may set. Raises RequestError (FS501, with ``param``) for a value out of range."""

    max_tokens: int = _parameter(128, "maximum number of new tokens", shapes_law=False, low=1, high=1_000_000)
    temperature: float = _parameter(0.0, "sampling temperature; 0 is greedy", shapes_law=True, low=0.0, high=2.0)
    top_p: float = _parameter(
        1.0, "keep the likeliest tokens up to this total probability; 1: all", shapes_law=True, low=0.0, high=1.0
    )
    top_k: int = _parameter(0, "keep the k likeliest tokens; 0: all", shapes_law=True, low=0, high=10_000_000)
    min_p: float = _parameter(
        0.0, "drop tokens below this share of the likeliest one's probability", shapes_law=True, low=0.0, high=1.0
    )
    seed: int | None = _parameter(
        None, "random seed; without one, every request gets a fresh one", shapes_law=True, low=-(2**63), high=2**64 - 1
    )
    stop: Sequence[str] = _parameter((), "stop strings: each ends the answer and is not part of it", shapes_law=False)
    ignore_eos: bool = _parameter(False, "continue after the model's end-of-sequence token", shapes_law=False)

    def __post_init__(self) -> None:
        for parameter in fields(self):
            value, record = getattr(self, parameter.name), _FIELDS[parameter.name]
            unset = value is None and parameter.default is None
            if record.low is not None and record.high is not None and not unset:
                _check(parameter.name, value, record.low, record.high)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if len(self.stop) > 16 or any(not s or len(s) > 1024 for s in self.stop):
            raise RequestError(
                f"stop={list(self.stop)!r:.200}", "at most 16 non-empty strings of up to 1024 characters",
                "shorten the stop list", param="stop",
            )  # fmt: skip

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax. Lower temperatures than this amount to it in float32 too."""
        return self.temperature < 1e-5 or self.top_k == 1 or self.top_p < 1e-9


def sampling_fields() -> Mapping[str, SamplingField]:
    """The record of every parameter by its name, which is the same in JSON, and has dashes on the command line."""
    return _FIELDS


def _check(name: str, value: float, low: float, high: float) -> None:
    integer = isinstance(low, int)
    right_type = isinstance(value, int if integer else int | float) and not isinstance(value, bool)
    if not right_type or not low <= value <= high:  # rejects NaN too, and integers too large for a float
        kind = "a whole number" if integer and not right_type else "a number"
        raise RequestError(
            f"{name}={value!r:.200}", f"{kind} from {low:g} to {high:g}", f"send {name} inside that range", param=name
        )


_FIELDS: Mapping[str, SamplingField] = {field.name: field.metadata[_RECORD] for field in fields(SamplingParams)}
LAW_FIELDS = tuple(name for name, record in _FIELDS.items() if record.shapes_law)  # what drafting by the law needs

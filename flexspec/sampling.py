"""Sampling parameters of a request: every field with its default, range, help and place, checked once at the door.

A parameter is added here; the command's options (flexspec/cli/sampling_options.py), the check of HTTP bodies
(runtime/server/requests.py) and what ranks tell each other (runtime/distributed/drafts.py) follow its record.
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

    help: str  # for people: what it does; the command line adds the default
    shapes_law: bool  # the target law depends on it, or the noise that a token is drawn with
    low: float | None = None  # its range, both ends included and whole where it takes whole numbers; None: no number
    high: float | None = None


def _parameter(
    default: Any, help: str, *, shapes_law: bool, low: float | None = None, high: float | None = None
) -> Any:
    return field(default=default, metadata={_RECORD: SamplingField(help, shapes_law, low, high)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request may set. Raises RequestError (FS501, with ``param``) for a value out of range."""

    max_tokens: int = _parameter(128, "most new tokens", shapes_law=False, low=1, high=1_000_000)
    temperature: float = _parameter(0.0, "0 is greedy", shapes_law=True, low=0.0, high=2.0)
    top_p: float = _parameter(
        1.0, "keep the likeliest tokens up to this mass; 1: all", shapes_law=True, low=0.0, high=1.0
    )
    top_k: int = _parameter(0, "keep the k likeliest tokens; 0: all", shapes_law=True, low=0, high=10_000_000)
    min_p: float = _parameter(0.0, "drop tokens below this share of the likeliest", shapes_law=True, low=0.0, high=1.0)
    seed: int | None = _parameter(
        None, "random seed; without one, every request gets a fresh one", shapes_law=True, low=-(2**63), high=2**64 - 1
    )
    stop: Sequence[str] = _parameter((), "stop strings: each ends the answer and is not part of it", shapes_law=False)
    ignore_eos: bool = _parameter(False, "continue after the model's end-of-sequence token", shapes_law=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, record = getattr(self, each.name), _FIELDS[each.name]
            if record.low is not None and record.high is not None and not (value is None and each.default is None):
                _check(each.name, value, record.low, record.high)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if len(self.stop) > 16 or any(not s or len(s) > 1024 for s in self.stop):
            raise RequestError(
                f"stop={list(self.stop)!r}", "at most 16 non-empty strings of up to 1024 characters",
                "shorten the stop list", param="stop",
            )  # fmt: skip

    @property
    def greedy(self) -> bool:
        """True when every token is the argmax. Temperatures this small underflow to it in float32 as well."""
        return self.temperature < 1e-5 or self.top_k == 1 or self.top_p < 1e-9


def sampling_fields() -> Mapping[str, SamplingField]:
    """The record of every parameter, by its name: in Python, in JSON, and with dashes on the command line."""
    return _FIELDS


def _check(name: str, value: float, low: float, high: float) -> None:
    whole = isinstance(low, int)
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not right or not low <= value <= high:  # refuses NaN too, and integers too large for a float
        kind = "a whole number" if whole and not right else "a number"
        raise RequestError(
            f"{name}={value!r}", f"{kind} from {low:g} to {high:g}", f"send {name} inside that range", param=name
        )


_FIELDS: Mapping[str, SamplingField] = {each.name: each.metadata[_RECORD] for each in fields(SamplingParams)}
LAW_FIELDS = tuple(name for name, record in _FIELDS.items() if record.shapes_law)  # what a draft by the law needs

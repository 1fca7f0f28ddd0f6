"""Parameters that are not offered: all of a request are refused at once by name, none is ignored."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flexspec.errors import RequestError
from flexspec.runtime.server.bodies.neutral import NeutralValues

_MOST_NAMED = 16  # in one message


class UnsupportedError(RequestError):
    """Parameters or values that this server does not offer. ``counted`` has a name of bounded variety for each."""

    def __init__(
        self, found: str, expected: str, fix: str, *, param: str | None = None, counted: tuple[str, ...] = ()
    ) -> None:
        super().__init__(found, expected, fix, param=param)
        self.counted = counted


@dataclass(frozen=True, slots=True)
class Refused:
    """One key that asks for something that is not offered."""

    param: str  # with its place, such as messages[0].audio
    counted: str  # for metrics: messages.audio, or messages.unknown for what no table has
    found: str


def refused_keys(
    body: Mapping[str, object], offered: Collection[str], neutral: NeutralValues, where: str = "", counted: str = ""
) -> list[Refused]:
    """The keys of ``body`` that are neither offered, nor null, nor neutral.

    ``where`` is the path in front of the key, such as ``messages[0].``; ``counted`` the same without numbers.
    """
    refused = []
    for key, value in body.items():
        if value is None or key in offered or (key in neutral and neutral[key](value, body)):
            continue
        param = where + cut(key)
        if key in neutral:
            refused.append(Refused(param, counted + key, f"{param}={shown(value)}, which is not offered"))
        else:
            refused.append(Refused(param, counted + "unknown", f"unknown parameter {param!r}"))
    return refused


def refuse(refused: list[Refused]) -> None:
    """Raise UnsupportedError naming all of ``refused``, if there are any."""
    if not refused:
        return
    named = refused[:_MOST_NAMED]
    more = f" and {len(refused) - len(named)} more" if len(refused) > len(named) else ""
    names = ", ".join(item.param for item in named)
    raise UnsupportedError(
        "; ".join(item.found for item in named) + more,
        "parameters that docs/http.md lists as offered, or values that ask for nothing",
        f"leave {names}{more} out",
        param=named[0].param,
        counted=tuple(dict.fromkeys(item.counted for item in refused)),
    )


def cut(text: str, most: int = 80) -> str:
    """``text`` cut to a length that fits an error message."""
    return text if len(text) <= most else text[: most - 3] + "..."


def shown(value: object) -> str:
    """``repr`` cut to a length that fits an error message; the value is not read beyond that."""
    return cut(_SHORT.repr(value))


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80

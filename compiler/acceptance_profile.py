"""Acceptance profiles: how many tokens a round commits with each draft plan, measured, from JSON files.

A profile is data from a run, or transcribed from a publication that is named in it; no number of it is in the code.
``benchmarks/acceptance_profile.py`` writes one. Files that ship lie in compiler/acceptance/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexspec.compiler.frontends.files import read_json_object
from flexspec.compiler.shipped import find_file, shipped_names
from flexspec.errors import ProfileError

FORMAT = "flexspec acceptance 1"
PROFILES = Path(__file__).parent / "acceptance"
MAX_NODES = 512
_KEYS = {"format", "llm", "ssms", "origin", "date", "prompts", "sampling", "entries"}
_ENTRY_KEYS = {"draft", "levels", "committed_tokens", "ssm_rows", "rounds"}


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """One draft plan: mean nodes at each depth below the root, and mean tokens that a round commits.

    ``ssm_rows``: rows that a request gives to each SSM step; the first feeds what the last round committed.
    """

    draft: str
    levels: tuple[float, ...]
    committed_tokens: float
    ssm_rows: tuple[float, ...]

    @property
    def nodes(self) -> float:
        return sum(self.levels)

    def rows(self, requests: int) -> int:
        """Rows of the verify step: every node and the root of each request."""
        return math.ceil(requests * (1 + self.nodes) - 1e-9)


OFF = DraftEntry("off", (), 1.0, ())


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """Where the numbers come from, and an entry a draft plan."""

    name: str
    llm: str
    ssms: tuple[str, ...]
    origin: str
    date: str
    prompts: str
    sampling: str
    entries: tuple[DraftEntry, ...]

    def source(self) -> str:
        return f"{self.name}: {self.llm} with {' + '.join(self.ssms) or 'no SSM'}, {self.sampling}; {self.origin}"


def shipped_profiles() -> list[str]:
    return shipped_names(PROFILES, ".json")


def open_acceptance(name_or_path: str) -> AcceptanceProfile:
    """A profile by the name of one that ships, or by its path. Raises ProfileError."""
    path = find_file(name_or_path, PROFILES, ".json")
    if path is None:
        expected = f"a .json file or one of {', '.join(shipped_profiles())}"
        raise ProfileError(f"acceptance profile {name_or_path!r}", expected, "check the name")
    return read_acceptance(read_json_object(path, "an acceptance profile"), path.stem)


def find_acceptance(ssms: Sequence[str]) -> AcceptanceProfile:
    """The shipped profile that was measured with these SSMs. Raises ProfileError when there is none."""
    for name in shipped_profiles():
        profile = open_acceptance(name)
        if profile.ssms == tuple(ssms):
            return profile
    raise ProfileError(
        f"no acceptance profile for {' + '.join(ssms)}",
        f"one that was measured with them (shipped: {', '.join(shipped_profiles())})",
        "pass --acceptance FILE; benchmarks/acceptance_profile.py measures one",
    )


def read_acceptance(body: Mapping[str, Any], name: str) -> AcceptanceProfile:
    """Check and take over a profile. Raises ProfileError naming what is wrong."""
    if body.get("format") != FORMAT:
        raise _bad(name, f"format {body.get('format')!r}", repr(FORMAT))
    odd = sorted(set(body) ^ _KEYS)
    if odd:
        raise _bad(name, f"keys missing or unknown: {', '.join(odd)}", f"the keys {', '.join(sorted(_KEYS))}")
    texts = {key: body[key] for key in ("llm", "origin", "date", "prompts", "sampling")}
    for key, value in texts.items():
        if not isinstance(value, str) or not value.strip():
            raise _bad(name, f"{key} = {value!r}", "a text")
    ssms, entries = body["ssms"], body["entries"]
    if not isinstance(ssms, list) or not all(isinstance(item, str) for item in ssms):
        raise _bad(name, f"ssms = {ssms!r}", "a list of names")
    if not isinstance(entries, list) or not entries:
        raise _bad(name, f"entries = {entries!r}", "a list of one or more draft plans")
    read = tuple(_entry(name, item) for item in entries)
    if len({entry.draft for entry in read}) < len(read):
        raise _bad(name, "a draft plan twice", "each draft plan once")
    return AcceptanceProfile(name, ssms=tuple(ssms), entries=read, **texts)


def _entry(name: str, item: Any) -> DraftEntry:
    if not isinstance(item, dict) or not {"draft", "levels", "committed_tokens"} <= set(item) <= _ENTRY_KEYS:
        raise _bad(name, f"entry {item!r}", "draft, levels and committed_tokens, perhaps ssm_rows and rounds")
    draft, committed = item["draft"], item["committed_tokens"]
    if not isinstance(draft, str) or not draft or draft == "off":
        raise _bad(name, f"draft {draft!r}", "a draft plan other than off")
    levels = _numbers(name, draft, "levels", item["levels"])
    if not levels or sum(levels) > MAX_NODES:
        raise _bad(name, f"{draft}: {sum(levels):g} nodes", f"above 0 and at most {MAX_NODES}")
    most = 1 + sum(min(1.0, level) for level in levels)
    if not _is_number(committed) or not 1.0 <= committed <= most + 1e-9:
        raise _bad(name, f"{draft}: committed_tokens {committed!r}", f"1 to {most:g}: one, and one a level at most")
    default = (float(math.ceil(committed)), *levels[:-1])
    given = "ssm_rows" in item
    rows = _numbers(name, draft, "ssm_rows", item["ssm_rows"]) if given else default
    return DraftEntry(draft, levels, float(committed), rows)


def _numbers(name: str, draft: str, key: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not all(_is_number(item) and item > 0 for item in value):
        raise _bad(name, f"{draft}: {key} {value!r}", "a list of numbers above 0")
    return tuple(float(item) for item in value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _bad(name: str, found: str, expected: str) -> ProfileError:
    return ProfileError(f"acceptance profile {name}: {found}", expected, "correct the file, or measure it again")

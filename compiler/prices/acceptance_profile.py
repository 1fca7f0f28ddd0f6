"""Acceptance profiles: measured numbers of tokens that a round commits with each draft plan, from JSON files.

A profile comes from a run, or is transcribed from a publication that it names; the code contains none of its numbers.
``flexspec bench --acceptance`` writes one. Shipped files are in compiler/prices/acceptance/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexspec.checked_table import Table, read_table
from flexspec.compiler.prices.shipped import find_file, shipped_names, unknown_words
from flexspec.draft_plan import DraftPlan
from flexspec.errors import ProfileError, RequestError

FORMAT = "flexspec acceptance 1"
PROFILES = Path(__file__).parent / "acceptance"
MAX_NODES = 512


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """What one draft plan drafts and commits."""

    draft: DraftPlan
    levels: tuple[float, ...]  # mean nodes at each depth below the root
    committed_tokens: float  # mean per round
    ssm_rows: tuple[float, ...]  # of a request in each SSM step; the first feeds what the last round committed
    most_nodes: int = 0  # of a round's tree, for memory; 0: every level's mean, rounded up

    @property
    def nodes(self) -> float:
        return sum(self.levels)

    def rows(self, requests: int) -> int:
        """Rows of the verify step: all nodes and every request's root."""
        return math.ceil(requests * (1 + self.nodes) - 1e-9)

    @property
    def most_rows(self) -> int:
        """Rows of a request's largest tree, including the root."""
        return 1 + max(self.most_nodes, sum(math.ceil(level - 1e-9) for level in self.levels))


OFF = DraftEntry(DraftPlan("off"), (), 1.0, ())


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """An entry for each draft plan, and where the numbers come from."""

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
    """A profile by its path, or by the name of a shipped one. Raises ProfileError."""
    path = find_file(name_or_path, PROFILES, ".json")
    if path is None:
        expected = f"a .json file or one of {', '.join(shipped_profiles())}"
        unknown, fix = unknown_words(name_or_path)
        raise ProfileError(f"acceptance profile {unknown}", expected, fix)
    return read_acceptance(read_table(path, "an acceptance profile as JSON", wrong), path.stem)


def find_acceptance(ssms: Sequence[str]) -> AcceptanceProfile:
    """The shipped profile measured with these SSMs. Raises ProfileError if there is none."""
    for name in shipped_profiles():
        profile = open_acceptance(name)
        if profile.ssms == tuple(ssms):
            return profile
    raise ProfileError(
        f"no acceptance profile for {' + '.join(ssms)}",
        f"one measured with them (shipped: {', '.join(shipped_profiles())})",
        "pass --acceptance FILE; flexspec bench ARTIFACT --acceptance measures one",
    )


def read_acceptance(table: Table, name: str) -> AcceptanceProfile:
    """The profile of a file's table. Raises ProfileError naming the invalid key."""
    sources = ("llm", "origin", "date", "prompts", "sampling")
    table.only(("format", "ssms", *sources, "entries"))
    written = table.text("format")
    if written != FORMAT:
        raise table.error("format", f"{written!r}", repr(FORMAT))
    texts = {key: table.text(key) for key in sources}
    entries = tuple(_entry(part) for part in table.array("entries"))
    profile = AcceptanceProfile(name, ssms=table.texts("ssms"), entries=entries, **texts)
    table.done()
    if len({entry.draft for entry in entries}) < len(entries):
        raise table.error("entries", "a repeated draft plan", "each draft plan once")
    return profile


def _entry(part: Table) -> DraftEntry:
    part.only(("draft", "levels", "committed_tokens"), ("ssm_rows", "most_nodes", "rounds"))
    draft, levels = _draft(part), part.numbers("levels")
    if draft.method == "off":
        raise part.error("draft", "'off'", "a draft plan other than off, which commits one token per round")
    if not levels or sum(levels) > MAX_NODES:
        raise part.error("levels", f"{sum(levels):g} nodes", f"above 0 and at most {MAX_NODES}")
    committed, most = part.number("committed_tokens"), 1 + sum(min(1.0, level) for level in levels)
    if not 1.0 <= committed <= most + 1e-9:
        expected = f"1 to {most:g}: one, and at most one per level"
        raise part.error("committed_tokens", f"{committed:g} ({draft})", expected)
    rows = (float(math.ceil(committed)), *levels[:-1])
    if part.has("ssm_rows"):
        rows = part.numbers("ssm_rows")
        if max(rows, default=0.0) > MAX_NODES:
            raise part.error("ssm_rows", f"{max(rows):g}", f"at most {MAX_NODES} rows per step")
    most_nodes = sum(math.ceil(level - 1e-9) for level in levels)
    if part.has("most_nodes"):
        most_nodes = part.count("most_nodes", MAX_NODES, most_nodes)
    if part.has("rounds"):
        part.count("rounds", 1 << 62)
    part.done()
    return DraftEntry(draft, levels, committed, rows, most_nodes)


def _draft(part: Table) -> DraftPlan:
    text = part.text("draft")
    try:
        return DraftPlan.parse(text)
    except RequestError as error:
        raise part.error("draft", f"{text!r}: {error.found}", error.expected) from None


def wrong(found: str, expected: str) -> ProfileError:
    return ProfileError(f"acceptance profile {found}", expected, "correct the file, or measure it again")

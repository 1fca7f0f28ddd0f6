"""Measures an acceptance profile for ``flexspec plan``: tokens per round with each draft plan of an artifact.

Every prompt is answered alone and greedily, and rounds are counted as the engine reports them; times play no part, so a
disturbed machine gives the same profile.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexspec.checked_table import Table
from flexspec.compiler.prices.acceptance_profile import FORMAT, read_acceptance, wrong
from flexspec.draft_plan import DraftPlan, worst_case
from flexspec.drafters.record import ssm_names
from flexspec.errors import ProfileError
from flexspec.runtime.engine.api import RequestStats
from flexspec.runtime.open.engine import open_engine
from flexspec.runtime.open.serve_options import ServeOptions
from flexspec.sampling import SamplingParams

PROMPTS = Path(__file__).with_name("prompts.jsonl")
DRAFTS = (
    "chain:1/sources=ssm",
    "chain:2/sources=ssm",
    "chain:4/sources=ssm",
    "tree:2,1/sources=ssm",
    "tree:4,2/sources=ssm",
    "tree:3,2,1/sources=ssm",
    "tree:4,2,2,1/sources=ssm",
)
Note = Callable[[int, int], None]  # (answers done, answers in all)


@dataclass(slots=True)
class RoundCounter:
    """An observer that sums rounds: how many, tokens committed, nodes verified at each depth."""

    rounds: int = 0
    committed: int = 0
    levels: list[int] = field(default_factory=list)

    def record_round(self, source: str, drafted: Sequence[int], accepted: Sequence[int], committed: int) -> None:
        del source, accepted
        self.rounds += committed > 0  # recorded once for each source, its tokens with the first
        self.committed += committed
        self.levels += [0] * (len(drafted) - len(self.levels))
        for depth, count in enumerate(drafted):
            self.levels[depth] += count

    def record_step(self, seconds: float, kind: str) -> None: ...

    def record_finished(self, reason: str, stats: RequestStats, first_token_s: float | None) -> None: ...

    def set_pages(self, free: int, total: int) -> None: ...

    def set_load(self, running: int, queued: int) -> None: ...


def measure_acceptance(
    artifact: Path,
    prompts: Sequence[str],
    *,
    drafts: Sequence[str] = DRAFTS,
    max_tokens: int = 64,
    llm_name: str = "",
    ssm_names: Sequence[str] = ("ssm",),
    source: str = "",
    note: Note = lambda done, of: None,
) -> dict[str, Any]:
    """The profile, as JSON. ``source`` says where the prompts come from; names are those of ``flexspec plan``.

    Raises what ``open_engine`` raises, RequestError for an invalid draft plan, and ProfileError for one that is off,
    drafts with no SSM (plan prices SSMs only) or is listed twice.
    """
    plans = {text: _checked(text) for text in drafts}
    if len({str(draft) for draft in plans.values()}) < len(drafts):
        raise ProfileError("a draft plan twice", "each draft plan once", "leave one out")
    entries: list[dict[str, Any]] = []
    done = 0
    name = artifact.name
    for text, draft in plans.items():
        counter = RoundCounter()
        served = open_engine(artifact, ServeOptions(draft=str(draft), measure=False, checks=not entries), counter)
        name = served.name
        try:
            for prompt in prompts:
                served.generate([served.question(prompt)], SamplingParams(max_tokens=max_tokens))
                note(done := done + 1, len(prompts) * len(plans))
        finally:
            served.close()
        entries.append(_entry(text, draft, counter))
    today = datetime.date.today().isoformat()
    body = {
        "format": FORMAT,
        "llm": llm_name or name,
        "ssms": list(ssm_names),
        "origin": f"measured {today} by flexspec bench --acceptance, one request at a time",
        "date": today,
        "prompts": f"{len(prompts)} of {source or 'the given prompts'}, {max_tokens} new tokens at most",
        "sampling": "greedy",
        "entries": entries,
    }
    read_acceptance(Table(body, name, wrong), name)  # a profile that plan would refuse must not be written
    return body


def read_prompts(path: Path, count: int) -> list[str]:
    """First turns of a file of JSON lines ({"turns": [...]} or {"prompt": "..."}), ``count`` spread evenly over it.

    Raises ProfileError naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: {error}", "a file of JSON lines", "name another with --prompts") from None
    rows = [prompt for number, line in enumerate(lines, 1) if line.strip() for prompt in _prompt(path, number, line)]
    if not rows:
        raise ProfileError(f"{path}: no prompts", "a prompt a line", "name another with --prompts")
    return [rows[i * len(rows) // count] for i in range(min(count, len(rows)))]  # categories may be grouped


def _prompt(path: Path, number: int, line: str) -> Iterator[str]:
    expected = '{"prompt": "..."} or {"turns": ["...", ...]}'
    try:
        row = json.loads(line)
        prompt = row["turns"][0] if "turns" in row else row["prompt"]
    except (ValueError, RecursionError, LookupError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt.strip():
        raise ProfileError(f"{path}, line {number}: {line:.60}", expected, "correct the line")
    yield prompt


def _checked(text: str) -> DraftPlan:
    draft = DraftPlan.parse(text)
    if draft.method == "off" or not set(draft.sources) <= set(ssm_names()):
        expected = "one that drafts with SSMs, as in tree:4,2/sources=ssm"
        raise ProfileError(f"draft plan {text}", expected, "name its sources: plan prices drafting by SSMs only")
    return draft


def _entry(text: str, draft: DraftPlan, counter: RoundCounter) -> dict[str, Any]:
    rounds = max(1, counter.rounds)
    return {
        "draft": text,
        "levels": [round(count / rounds, 6) for count in counter.levels if count],
        "committed_tokens": round(counter.committed / rounds, 6),
        "most_nodes": worst_case(draft).max_nodes,
        "rounds": counter.rounds,
    }

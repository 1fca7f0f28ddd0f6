"""What the engine reports while it runs, and how a verified tree is counted by source and depth."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from flexspec.runtime.engine.api import RequestStats
from flexspec.tree import TokenTree


class Observer(Protocol):
    """Called from the engine's thread; the server's metrics implement it."""

    def record_round(self, source: str, drafted: Sequence[int], accepted: Sequence[int], committed: int) -> None: ...

    def record_step(self, seconds: float, kind: str) -> None: ...

    def record_finished(self, reason: str, stats: RequestStats, first_token_s: float | None) -> None: ...

    def set_pages(self, free: int, total: int) -> None: ...

    def set_load(self, running: int, queued: int) -> None: ...


def report_round(observer: Observer, tree: TokenTree, taken: Collection[int], committed: int) -> None:
    """One round of one request: nodes drafted and committed (``taken``) by source and depth; "off" without drafts.

    The tokens it committed are reported once, with the first source, so that they are not counted twice.
    """
    if len(tree) == 1:
        observer.record_round("off", (), (), committed)
        return
    counts: dict[str, tuple[list[int], list[int]]] = {}
    for node in range(1, len(tree)):
        depth = tree.depths[node]
        drafted, accepted = counts.setdefault(tree.sources[node], ([], []))
        for column in (drafted, accepted):
            column.extend([0] * (depth - len(column)))
        drafted[depth - 1] += 1
        accepted[depth - 1] += node in taken
    for i, (source, (drafted, accepted)) in enumerate(sorted(counts.items())):
        observer.record_round(source, drafted, accepted, committed if i == 0 else 0)

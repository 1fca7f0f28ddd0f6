"""Progress bars for long steps; plain lines when the output is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from flexspec.progress import Progress


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yields ``progress(what, done, of)``; each ``what`` gets a bar."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        seen: set[str] = set()

        def lines(what: str, done: int, of: int) -> None:
            if what not in seen:
                seen.add(what)
                print(f"{what} ...", file=sys.stderr, flush=True)

        yield lines
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Bars(*columns, TimeElapsedColumn(), console=console) as bars:
        tasks: dict[str, int] = {}

        def update(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=of)
            bars.update(tasks[what], completed=done, total=of)  # type: ignore[arg-type]

        yield update

"""Which options of ``flexspec plan`` go together: an option that would be ignored is refused before any search."""

from __future__ import annotations

import argparse
from pathlib import Path

from flexspec.errors import PlanError

TURNS = 5  # of --compare
_CONFLICTS = (  # the first ignores the others
    ("compare", ("prove", "pareto", "score", "svg", "output")),
    ("pareto", ("score", "prove", "svg", "output")),
    ("score", ("prove",)),
)


def check_options(args: argparse.Namespace) -> None:
    """Raises PlanError for options that contradict each other, and for files that cannot be written."""
    for name, others in _CONFLICTS:
        is_set = getattr(args, name) is not None if name == "compare" else getattr(args, name)
        clash = next((other for other in others if getattr(args, other)), "") if is_set else ""
        if clash:
            raise PlanError(f"--{name} with --{clash}", "one of them", f"leave out --{clash}")
    if args.turns is not None and args.compare is None:
        raise PlanError("--turns without --compare", "--compare, which runs plans", "pass it, or leave out --turns")
    for name in ("output", "svg"):
        _check_target(f"--{name}", getattr(args, name))


def _check_target(option: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise PlanError(f"{option} {path}, which is a folder", "a path to a file", "add a file name")
    if not path.parent.is_dir():
        found = f"{option} {path}: the folder {path.parent} does not exist"
        raise PlanError(found, "a file in an existing folder", "make the folder, or choose another path")

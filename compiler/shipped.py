"""Data files that come with flexspec: found by their bare name, or by a path like any other file."""

from __future__ import annotations

from pathlib import Path


def shipped_names(folder: Path, suffix: str) -> list[str]:
    """Bare names of the folder's files."""
    return sorted(path.stem for path in folder.glob(f"*{suffix}"))


def find_file(name_or_path: str, folder: Path, suffix: str) -> Path | None:
    """The shipped file of this bare name, or else the file at this path; None when there is neither."""
    path = Path(name_or_path)
    if path.suffix != suffix and (folder / f"{name_or_path}{suffix}").is_file():
        path = folder / f"{name_or_path}{suffix}"
    return path if path.is_file() else None

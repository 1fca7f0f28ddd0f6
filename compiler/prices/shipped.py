"""Data files that come with flexspec: found by their bare name, or by a path like any other file."""

from __future__ import annotations

from pathlib import Path


def shipped_names(folder: Path, suffix: str) -> list[str]:
    """Bare names of the folder's files."""
    return sorted(path.stem for path in folder.glob(f"*{suffix}"))


def unknown_words(name_or_path: str) -> tuple[str, str]:
    """(what was found, the fix) when :func:`find_file` finds nothing: a path is told from a name."""
    path = Path(name_or_path)
    is_path = len(path.parts) > 1 or path.suffix in (".toml", ".json")
    return (
        (f"{name_or_path!r}: does not exist", "check the path") if is_path else (f"{name_or_path!r}", "check the name")
    )


def find_file(name_or_path: str, folder: Path, suffix: str) -> Path | None:
    """The shipped file of this bare name, or else the file at this path; None when there is neither."""
    path = Path(name_or_path)
    if path.suffix != suffix and (folder / f"{name_or_path}{suffix}").is_file():
        path = folder / f"{name_or_path}{suffix}"
    return path if path.is_file() else None
